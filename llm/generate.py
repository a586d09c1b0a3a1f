"""Text from a trained run: ``python -m llm.generate RUN --prompt "..."``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from llm.cli import command
from llm.errors import UserError
from llm.model.decoder import Decoder
from llm.model.room import with_room

WINDOW = 32  # ids that `TextStream` decodes again with each new one, at most twice as many


def sample(
    logits_BW: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits [B, W], int64 [B]; the likeliest where `temperature` is 0.

    `top_k` keeps the k likeliest tokens; `top_p` then the fewest whose probabilities, at this temperature, reach p
    (nucleus sampling, arXiv 1904.09751), at least one.
    """
    if temperature == 0:
        return logits_BW.argmax(dim=-1)
    logits_BW, order = (logits_BW.float() / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        logits_BW, order = logits_BW[:, :top_k], order[:, :top_k]
    probabilities = logits_BW.softmax(dim=-1)
    if top_p is not None:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill((likelier >= top_p) & (likelier > 0), 0.0)
    return order.gather(1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(1)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor] = lambda logits_BW: logits_BW.argmax(dim=-1),
    stop: int | None = None,
) -> Iterator[int]:
    """New tokens after `prompt` (at least one token), one by one, until `stop` comes, which is not given out.

    The prompt is read in one pass, each new token by one `step` of the decoder. `choose` makes a token [B] out of
    logits [B, W]: greedily, or with `sample`.
    """
    device = model.head_weight.device
    hidden, state, _ = model(torch.tensor([list(prompt)], device=device), return_state=True)
    state = with_room(model, state, len(prompt) + max_new_tokens)
    logits_BW = model.logits(hidden[:, -1])
    for i in range(max_new_tokens):
        token_B = choose(logits_BW)
        if token_B.item() == stop:
            return
        yield token_B.item()
        if i + 1 < max_new_tokens:
            logits_BW, state = model.step(token_B, state)


class TextStream:
    """Tokens to text as they come: characters of which only some bytes have come are held back.

    `decode` makes text out of a list of ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.ids, self.given = decode, [], 0

    def push(self, token: int) -> str:
        """The text that is certain with one more token."""
        self.ids.append(token)
        text = self.decode(self.ids)
        # only the last replacement character can become another one: it may be the beginning of a character
        ready = text.removesuffix("\N{REPLACEMENT CHARACTER}")
        new, self.given = ready[self.given :], max(self.given, len(ready))
        if len(self.ids) >= 2 * WINDOW and ready == text:
            self.ids = self.ids[-WINDOW:]
            self.given = len(self.decode(self.ids))
        return new

    def flush(self) -> str:
        """What was held back, as replacement characters."""
        text = self.decode(self.ids)
        new, self.given = text[self.given :], len(text)
        return new


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; UserError for values out of range."""
    parser = argparse.ArgumentParser(
        prog="python -m llm.generate", description="Continue a text with the model of a run. The text goes to stdout."
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="at most this many (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: likeliest token (%(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="... among the likeliest that together reach P")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    parser.add_argument("--step", help="checkpoint of this step, or best (default: the newest)")
    parser.add_argument("--device", help="for instance cpu or cuda:0 (default: a GPU where there is one)")
    options = parser.parse_args(words)
    limits = {
        "max-new-tokens": (options.max_new_tokens >= 0, "0 or more"),
        "temperature": (options.temperature >= 0, "0 or more"),
        "top-k": (options.top_k is None or options.top_k >= 1, "1 or more"),
        "top-p": (options.top_p is None or 0 < options.top_p <= 1, "above 0, at most 1"),
    }
    for name, (fits, expected) in limits.items():
        if not fits:
            raise UserError(f"--{name} {getattr(options, name.replace('-', '_'))}: must be {expected}.")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that could not be decoded
        raise UserError(f"--prompt {options.prompt!a}: not UTF-8 at character {error.start}. Give text.") from error
    return options


def choose_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU where there is one. UserError for one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]} Use --device cpu.") from error
    return torch.device(name)


@command
def main(words: Sequence[str] | None = None) -> None:
    """Stream a continuation to stdout; the prompt comes first."""
    from llm.runs import load_run  # after the arguments: --help and mistakes answer at once

    options = parse_arguments(words)
    device = choose_device(options.device)
    model, tokenizer, config = load_run(options.run, options.step, device)
    start = tokenizer.bos_token_id if config.data.bos else None
    prompt = tokenizer(options.prompt, add_special_tokens=False)["input_ids"]
    if start is not None or not prompt:
        prompt = [tokenizer.eos_token_id if start is None else start, *prompt]
    generator = torch.Generator(device).manual_seed(options.seed)
    ways = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    tokens = generate(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        choose=lambda logits_BW: sample(logits_BW, **ways, generator=generator),
        stop=tokenizer.eos_token_id,
    )
    stream = TextStream(lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    print(options.prompt, end="", flush=True)
    for token in tokens:
        print(stream.push(token), end="", flush=True)
    print(stream.flush(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
