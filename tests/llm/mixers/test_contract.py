"""What every mixer must hold, whichever it is: a mixer is tested because its yaml file exists."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llm.build import build_mixer
from llm.errors import UserError
from mixer_kernels import Segments

D = 64


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def starts(tokens: int, *at: int) -> Segments:
    is_start = torch.zeros(1, tokens, dtype=torch.bool)
    is_start[:, list(at)] = True
    return Segments.from_starts(is_start)


@pytest.mark.parametrize("tokens", [1, 2, 67])
def test_forward_equals_repeated_step(mixer_name, make_mixer, tokens):
    mixer, x = make_mixer(mixer_name), rows(2, tokens)
    y, final, _ = mixer(x, Segments.whole_rows(2, tokens), return_state=True)
    state = mixer.init_state(2, tokens, "cpu", torch.float64)
    for t in range(tokens):
        y_t, state = mixer.step(x[:, t], state)
        torch.testing.assert_close(y_t, y[:, t], rtol=1e-9, atol=1e-9)
    assert final.keys() == state.keys()
    for name in state:
        torch.testing.assert_close(final[name], state[name], rtol=1e-9, atol=1e-9)


def test_packed_documents_equal_separate_ones(mixer_name, make_mixer):
    mixer, cuts = make_mixer(mixer_name), [0, 1, 2, 40, 64, 90]
    x = rows(1, 90)
    packed = mixer(x, starts(90, *cuts[:-1])).y
    for begin, end in itertools.pairwise(cuts):
        alone = mixer(x[:, begin:end], Segments.whole_rows(1, end - begin)).y
        torch.testing.assert_close(packed[:, begin:end], alone, rtol=1e-9, atol=1e-9)


def test_future_tokens_change_nothing_before(mixer_name, make_mixer):
    mixer, x = make_mixer(mixer_name), rows(1, 70)
    changed = torch.cat([x[:, :33], rows(1, 37)], dim=1)
    segments = Segments.whole_rows(1, 70)
    before, after = mixer(x, segments).y, mixer(changed, segments).y
    torch.testing.assert_close(before[:, :33], after[:, :33], rtol=1e-10, atol=1e-10)
    assert (before[:, 33:] - after[:, 33:]).abs().amax() > 1e-6


def test_continues_from_state_in_pieces(mixer_name, make_mixer):
    """Forward over the whole == forward over pieces handing on the state, with a new document inside the last piece."""
    mixer, x = make_mixer(mixer_name), rows(1, 50)
    whole = mixer(x, starts(50, 0, 45)).y
    state, got = mixer.init_state(1, 50, "cpu", torch.float64), []
    for begin, end, cuts in ((0, 3, ()), (3, 4, ()), (4, 31, ()), (31, 50, (14,))):
        y, state, _ = mixer(x[:, begin:end], starts(end - begin, *cuts), state, return_state=True)
        got.append(y)
    torch.testing.assert_close(torch.cat(got, 1), whole, rtol=1e-9, atol=1e-9)
    y_next, _ = mixer.step(x[:, 0], state)  # the state is that of the last document alone
    alone = mixer(torch.cat([x[:, 45:], x[:, :1]], 1), Segments.whole_rows(1, 6)).y[:, -1]
    torch.testing.assert_close(y_next, alone, rtol=1e-9, atol=1e-9)


def test_flops_formula_equals_the_counted_products(mixer_name, make_mixer):
    """A step over a cache of just the right size does the products of one token and no more."""
    mixer, tokens = make_mixer(mixer_name, torch.float32), 5  # no more than a window that a variant has
    x = rows(1, tokens).float()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
        for t in range(tokens):
            mixer.step(x[:, t], mixer.init_state(1, t + 1, "cpu", torch.float32))
    assert mixer.flops(tokens, tokens**2) == counter.get_total_flops()


def test_state_bytes_count_the_state(mixer_name, make_mixer):
    """fp32 recurrent state, the rest in bf16; positions are not counted."""
    mixer = make_mixer(mixer_name, torch.float32)
    for context in (40, 80):
        state = mixer.init_state(1, context, "cpu", torch.bfloat16)
        assert sum(s.nbytes for s in state.values() if s.is_floating_point()) == mixer.state_bytes(context)
    matrices = [s for s in state.values() if s.dtype is torch.float32 and s.ndim == 4 and min(s.shape[2:]) > 1]
    assert mixer.state_elements() == sum(s.numel() for s in matrices)


def test_every_parameter_gets_a_gradient(mixer_name, make_mixer):
    mixer = make_mixer(mixer_name)
    mixer(rows(2, 20), Segments.whole_rows(2, 20)).y.square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_reset_parameters_fills_every_parameter(mixer_name, make_mixer):
    mixer = make_mixer(mixer_name)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(float("nan"))
    mixer.reset_parameters(0.02)
    assert all(p.isfinite().all() for p in mixer.parameters())


def test_bf16_autocast_keeps_gates_and_state_wide(mixer_name, make_mixer):
    mixer, x = make_mixer(mixer_name, torch.float32), rows(1, 80).float()
    segments = Segments.whole_rows(1, 80)
    wide = mixer(x, segments).y
    with torch.autocast("cpu", torch.bfloat16):
        narrow, state, _ = mixer(x, segments, return_state=True)
    assert narrow.dtype is torch.bfloat16
    assert state.get("recurrent", wide).dtype is torch.float32
    assert (narrow.float() - wide).norm() < 0.03 * wide.norm()


@pytest.mark.costly
def test_compiles_into_one_graph(mixer_name, make_mixer):
    mixer, x = make_mixer(mixer_name, torch.float32), rows(2, 70).float()
    segments = starts(70, 0, 10, 64)
    segments = Segments(segments.row_start.expand(2, -1).contiguous())
    torch.compiler.reset()  # mixers share a `forward`, and a model has fewer kinds than there are here
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, segments).y, mixer(x, segments).y)


@pytest.mark.parametrize(
    "setting",
    ["gdn impl=foo", "gdn num_heads=0", "gdn conv_size=0", "softmax num_heads=0", "mom balance=-1"],
)
def test_settings_that_make_no_sense_are_refused_by_name(make_mixer, setting):
    name, value = setting.split()[1].split("=")
    with pytest.raises(UserError, match=rf"mixers\.{setting.split()[0]}: {name}='?{value}"):
        make_mixer(setting)


@pytest.mark.parametrize("mixer", ["gla", "gdn", "kda"])
def test_value_heads_may_share_keys(make_config, mixer):
    """Each value head keeps its own gates and state."""
    found = build_mixer(make_config(mixer, f"+mixers.{mixer}.key_heads=1"), mixer, 1)
    found.reset_parameters(0.2)
    found.double()
    assert found.num_heads > found.key_heads == 1
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    assert found(x, Segments.whole_rows(1, 9)).y.shape == x.shape
