"""The model card: what the model is, what it was trained on, how far it got, and how to load it."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.config import TrainConfig
from llm.export.fla import TYPES
from llm.export.parity import Parity
from llm.identity import mixer_label
from llm.layout import describe_layout, layer_names
from llm.model.decoder import Decoder

CURVE = "curve.png"
POINTS = 8  # lines of the table of losses
SHOWN_PACKAGES = ("torch", "triton", "transformers")
Metrics = list[dict[str, Any]]


def write_card(
    folder: Path,
    run: Path,
    step: int,
    model: Decoder,
    config: TrainConfig,
    parity: Parity | None,
    *,
    licence: str | None,
) -> None:
    """Write README.md, and a plot of the losses where matplotlib is installed, into the folder of an export."""
    metrics = read_metrics(run, step)
    plotted = plot(metrics, folder / CURVE)
    loading = how_to_load(folder, config.model.name)
    sections = {
        "Model": model_lines(model, config),
        "Training": training_lines(run, step, metrics, config),
        "Losses": loss_table(metrics) + (["", f"![losses]({CURVE})"] if plotted else []),
        "Use": ["```python", *loading, "```"],
        "Checked": checked_lines(parity),
    }
    lines = [*front_matter(licence), f"# {config.model.name} {mixer_label(config)}"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *content]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def checked_lines(parity: Parity | None) -> list[str]:
    """How the export compares with the model."""
    if parity is None:
        return ["Not compared with the model."]
    return ["Loaded through transformers in a process of its own and compared with the model:", f"{parity}."]


def read_metrics(run: Path, step: int) -> Metrics:
    """The lines of metrics.jsonl up to `step`; of several for one step (after a crash) the last."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    by_step = {record["step"]: record for record in map(json.loads, lines) if record.get("step", step + 1) <= step}
    return [by_step[s] for s in sorted(by_step)]


def front_matter(licence: str | None) -> list[str]:
    """What the hub reads."""
    named = [f"license: {licence}"] if licence else []
    return ["---", "library_name: transformers", "pipeline_tag: text-generation", *named, "tags: [mixlab]", "---", ""]


def model_lines(model: Decoder, config: TrainConfig) -> list[str]:
    """Layout, sizes and the settings of the mixers."""
    names = layer_names(config)
    lines = [
        f"- layout: {describe_layout(names)}",
        f"- parameters: {sum(p.numel() for p in model.parameters()):,}, "
        f"{model.non_embedding_parameters():,} without embedding and head",
        f"- width {config.model.d_model}, MLP width {model.layers[0].mlp.up_proj.out_features}, "
        f"{model.vocab_size:,} tokens, trained on rows of {config.context:,}",
    ]
    for name in dict.fromkeys(names):
        settings = {k: v for k, v in config.mixers[name].items() if not k.startswith("_")}
        lines.append(f"- {name}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
    return lines


def training_lines(run: Path, step: int, metrics: Metrics, config: TrainConfig) -> list[str]:
    """Data, tokens, results, command and versions."""
    latest: dict[str, Any] = {}
    for record in metrics:
        latest |= record
    lines = [
        f"- data: {config.data.name}{_file_names(config.data.path)}; their licences are stated where they come from",
        f"- step {step:,}, {step * config.batch_tokens:,} tokens, {config.batch_tokens:,} a step, seed {config.seed}",
        f"- optimizer {config.optim.name}, peak learning rate {config.optim.lr:g}, schedule {config.schedule.name}",
    ]
    shown = {
        "val_loss": "validation loss {:.4f}",
        "val_perplexity": "perplexity {:.2f}",
        "loss": "training loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
    }
    reached = [text.format(latest[name]) for name, text in shown.items() if latest.get(name) is not None]
    probes = [f"{name} {value:.4g}" for name, value in latest.items() if name.startswith("eval") and value is not None]
    lines.append(f"- reached: {', '.join([*reached, *probes]) or 'not measured'}")
    return lines + environment_lines(run)


def environment_lines(run: Path) -> list[str]:
    """Command, versions, devices and commit of the last start."""
    try:
        start = json.loads((run / "environment.json").read_text())[-1]
    except (OSError, ValueError, IndexError):
        return []
    packages = ", ".join(f"{name} {start['packages'][name]}" for name in SHOWN_PACKAGES if start["packages"].get(name))
    devices = ", ".join(f"{start['devices'].count(d)} x {d}" for d in dict.fromkeys(start["devices"])) or "CPU"
    lines = [f"- {packages}; Python {start['python']}; {devices}", f"- command: `{shlex.join(start['command'])}`"]
    return lines + ([f"- code: commit {start['git']['commit'][:12]}"] if start.get("git") else [])


def loss_table(metrics: Metrics) -> list[str]:
    """A few lines of the losses, evenly spaced, the last one included."""
    rows = [m for m in metrics if m.get("val_loss") is not None] or metrics
    if not rows:
        return ["No metrics were written."]
    count = min(POINTS, len(rows))
    picked = [rows[round((i + 1) * len(rows) / count) - 1] for i in range(count)]
    cell = lambda value: "" if value is None else f"{value:.4f}"  # noqa: E731
    lines = [f"| {m['step']:,} | {cell(m.get('loss'))} | {cell(m.get('val_loss'))} |" for m in picked]
    return ["| step | training loss | validation loss |", "| --- | --- | --- |", *lines]


def plot(metrics: Metrics, path: Path) -> bool:
    """Plot training and validation loss over tokens. False where matplotlib is missing or there is nothing to plot."""
    curves = {
        label: [(m["tokens"], m[name]) for m in metrics if m.get(name) is not None and "tokens" in m]
        for name, label in (("loss", "training"), ("val_loss", "validation"))
    }
    if importlib.util.find_spec("matplotlib") is None or not any(curves.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def how_to_load(folder: Path, name: str) -> Sequence[str]:
    """Lines of Python that load the export, called `name`, and continue a text."""
    trust = ", trust_remote_code=True" if list(folder.glob("modeling_*.py")) else ""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return [
        *(["import fla"] if model_type in {t.model_type for t in TYPES} else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{trust})',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        'inputs = tokenizer("It was a dark night", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))",
    ]


def _file_names(path: Any) -> str:
    """The last parts of the paths of the data: where they lay on the machine is nobody's business."""
    paths = path if isinstance(path, list) else list(path.values()) if isinstance(path, dict) else [path]
    names = [str(p).rstrip("/").rpartition("/")[2].removeprefix("bundled:") for p in paths if isinstance(p, str)]
    return f" ({', '.join(names)})" if names else ""
