"""Attention with the products around it, as one plan: against the same in f64 by PyTorch alone, with caches, refusals, gradients, and the modules that run it."""

import pytest
import torch
from conftest import close
from test_torch_transformers import calls_of
from torch import nn

import verdigris as vd
import verdigris.torch as vt

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FEATURES, ELEMENTS = 24, 8
#: A result has gone through three roundings to its type: of the projections, of what attention gives and its own. Errors of the first two are of their size and
#: are summed by the products behind them, so that a small result has them whole.
SLACK = 6.0


def turned(x, cos, sin, interleaved):
    """`[batch, positions, heads, elements]`, pair by pair, as the angles of `[batch or 1, positions, pairs]` say."""
    x = x.clone()
    half = x.shape[-1] // 2
    for i in range(half):
        low, high = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        a, b, c, s = x[..., low].clone(), x[..., high].clone(), cos[..., i].unsqueeze(2), sin[..., i].unsqueeze(2)
        x[..., low], x[..., high] = a * c - b * s, b * c + a * s
    return x


def right_of(x, w, wo, heads, kv_heads, bias=None, last_bias=None, residual=None, rope=None, interleaved=False, mask=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, cache=None, lengths=None):
    """The block in f64: one query at a time over the keys that it attends to."""
    x, w, wo, bias, last_bias, residual = (None if t is None else t.double() for t in (x, w, wo, bias, last_bias, residual))
    made = x @ w.T + (0 if bias is None else bias)
    q, k, v = made.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=2)
    if rope is not None:
        q, k = (turned(t, *(angle.double() for angle in rope), interleaved) for t in (q, k))
    batch, count = x.shape[:2]
    out = torch.zeros(batch, count, heads, q.shape[-1], dtype=torch.float64)
    for b in range(batch):
        keys, values, shift = k[b], v[b], 0
        if cache is not None:
            keys, values = (c[b].double().clone() for c in cache)
            for i in range(count):
                place = int(lengths[b]) - count + i
                if 0 <= place < keys.shape[0]:
                    keys[place], values[place] = k[b, i], v[b, i]
            used = min(max(int(lengths[b]), 0), keys.shape[0])
            keys, values, shift = keys[:used], values[:used], used - count
        for i in range(count):
            for h in range(heads):
                apart = torch.arange(keys.shape[0]) - i - shift
                scores = keys[:, h // (heads // kv_heads)] @ q[b, i, h] * q.shape[-1] ** -0.5
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                if slopes is not None:
                    scores = scores - slopes[h].double() * apart.abs()
                left_out = (apart > 0) if causal else torch.zeros_like(apart, dtype=torch.bool)
                left_out = left_out | (apart < -window[0]) if window[0] >= 0 else left_out
                left_out = left_out | (apart > window[1]) if window[1] >= 0 else left_out
                if mask is not None:
                    given = mask[i, : keys.shape[0]]
                    scores, left_out = (scores, left_out | ~given) if given.dtype == torch.bool else (scores + given.double(), left_out)
                p = scores.masked_fill(left_out, float("-inf")).softmax(-1).nan_to_num() if keys.shape[0] else scores
                out[b, i, h] = p @ values[:, h // (heads // kv_heads)]
    y = out.flatten(2) @ wo.T + (0 if last_bias is None else last_bias)
    return (y if residual is None else y + residual), k, v


def drawn(dtype, heads=4, kv_heads=2, batch=2, count=5, elements=ELEMENTS, outputs=FEATURES):
    """`x`, the two weights and the two biases."""
    all_heads = heads + 2 * kv_heads
    make = lambda *shape, by=1.0: (torch.randn(shape, dtype=torch.float64) * by).to(dtype)
    return (
        make(batch, count, FEATURES),
        make(all_heads * elements, FEATURES, by=FEATURES**-0.5),
        make(outputs, heads * elements, by=(heads * elements) ** -0.5),
        make(all_heads * elements),
        make(outputs),
    )


def angles_of(positions, dtype, elements=ELEMENTS):
    """Cosines and sines of `[1, positions, pairs]`."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * 10.0 ** (-torch.arange(elements // 2, dtype=torch.float64))
    return angle.cos().to(dtype)[None], angle.sin().to(dtype)[None]


def whole(rope, interleaved):
    """An angle for each element of a head."""
    return tuple(angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1) for angle in rope)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads, kv_heads, count", [(4, 2, 5), (3, 1, 7), (2, 2, 1), (4, 4, 13)])
def test_a_block_is_what_its_functions_are(dtype, heads, kv_heads, count):
    x, w, wo, bias, last_bias = drawn(dtype, heads, kv_heads, count=count, outputs=FEATURES)
    residual = torch.randn_like(x)
    with torch.no_grad():
        close(vt.attention_block(x, w, wo, heads=heads, kv_heads=kv_heads), right_of(x, w, wo, heads, kv_heads)[0], SLACK)
        y = vt.attention_block(x, w, wo, heads=heads, kv_heads=kv_heads, qkv_bias=bias, out_bias=last_bias, residual=residual, is_causal=True)
    close(y, right_of(x, w, wo, heads, kv_heads, bias, last_bias, residual, causal=True)[0], SLACK)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_rotary_positions(dtype, interleaved, is_whole):
    x, w, wo, bias, _ = drawn(dtype, count=6)
    rope = angles_of(6, dtype)
    given = whole(rope, interleaved) if is_whole else rope
    with torch.no_grad():
        y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, qkv_bias=bias, rope=given, rope_interleaved=interleaved, is_causal=True)
    close(y, right_of(x, w, wo, 4, 2, bias, rope=rope, interleaved=interleaved, causal=True)[0], SLACK)
    # The angles matter.
    assert (y.double() - right_of(x, w, wo, 4, 2, bias, causal=True)[0]).abs().max() > 0.05


@pytest.mark.parametrize("words", [dict(window=(2, 1)), dict(causal=True, window=(3, -1)), dict(softcap=1.5, causal=True), dict(slopes=True)])
def test_options_of_attention(words):
    x, w, wo, *_ = drawn(torch.float32, count=9)
    words = {**words, **({"slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])} if "slopes" in words else {})}
    said = {"causal": "is_causal", "window": "window_size", "slopes": "alibi_slopes", "softcap": "softcap"}
    with torch.no_grad():
        y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, **{said[name]: value for name, value in words.items()})
    close(y, right_of(x, w, wo, 4, 2, **words)[0], SLACK)


def test_masks():
    x, w, wo, *_ = drawn(torch.float32, count=9)
    for mask in (torch.rand(9, 9) < 0.6, torch.randn(9, 9)):
        with torch.no_grad():
            y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, attn_mask=mask)
        close(y, right_of(x, w, wo, 4, 2, mask=mask)[0], SLACK)


def caches(dtype, batch, room, kv_heads, heads_first):
    """Keys and values `[batch, room, heads, elements]`, in either order in memory, NaN behind nothing: what is not attended is large."""
    made = [torch.full((batch, room, kv_heads, ELEMENTS), 50.0).to(dtype) for _ in range(2)]
    return [c.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else c for c in made]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_rope, interleaved", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_positions_one_by_one_behind_a_cache_are_those_of_all_at_once(dtype, has_rope, interleaved, heads_first):
    count, room = 7, 9
    x, w, wo, bias, last_bias = drawn(dtype, count=count)
    rope = angles_of(count, dtype) if has_rope else None
    k_cache, v_cache = caches(dtype, 2, room, 2, heads_first)
    right, keys, values = right_of(x, w, wo, 4, 2, bias, last_bias, rope=rope, interleaved=interleaved, causal=True)
    begin, steps = 0, [3, 1, 1, 2]
    lengths = torch.zeros(2, dtype=torch.int32)
    for step in steps:
        part = slice(begin, begin + step)
        angles = None if rope is None else tuple(angle[:, part] for angle in rope)
        lengths += step
        with torch.no_grad():
            y = vt.attention_block(
                x[:, part], w, wo, heads=4, kv_heads=2, qkv_bias=bias, out_bias=last_bias, rope=angles, rope_interleaved=interleaved, is_causal=True, k_cache=k_cache, v_cache=v_cache, kv_lengths=lengths
            )
        close(y, right[:, part], SLACK)
        begin += step
    close(k_cache[:, :count], keys, 2.0)
    close(v_cache[:, :count], values, 2.0)
    assert bool((k_cache[:, count:] == 50).all() and (v_cache[:, count:] == 50).all()), "nothing else is written"


def test_lengths_are_not_trusted_and_differ():
    x, w, wo, *_ = drawn(torch.float32, batch=5, count=2)
    k_cache, v_cache = (torch.randn(5, 6, 2, ELEMENTS) for _ in range(2))
    before = [c.clone() for c in (k_cache, v_cache)]
    lengths = torch.tensor([2, 6, 7, 1, -3], dtype=torch.int32)
    with torch.no_grad():
        y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, k_cache=k_cache, v_cache=v_cache, kv_lengths=lengths)
    right, keys, values = right_of(x, w, wo, 4, 2, cache=before, lengths=lengths)
    close(y, right, SLACK)
    for cache, old, new in zip((k_cache, v_cache), before, (keys, values)):
        for b, length in enumerate(lengths.tolist()):
            for place in range(6):
                row = place - (length - 2)
                close(cache[b, place], new[b, row] if 0 <= row < 2 else old[b, place].double(), 2.0)


def test_it_is_one_call():
    x, w, wo, bias, last_bias = drawn(torch.float32, count=6)
    cache = caches(torch.float32, 2, 8, 2, False)
    lengths = torch.full((2,), 6, dtype=torch.int32)
    with torch.no_grad():
        call = lambda: vt.attention_block(x, w, wo, heads=4, kv_heads=2, qkv_bias=bias, rope=angles_of(6, x.dtype), residual=x, k_cache=cache[0], v_cache=cache[1], kv_lengths=lengths)
        assert calls_of(call) == ["attention_block"]
        plans = vt.plan_count()
        call()
        assert vt.plan_count() == plans, "the plan is kept"
    tensors = (x, w, bias, wo, last_bias, x, None, None, None, None, None, None, None)
    told = vt.explain("attention_block", "scale=0.25 heads=4 kv_heads=2", *tensors)
    assert "attention" in told and "gemm" in told, told


@pytest.mark.parametrize("interleaved", [None, False, True])
def test_gradients_are_those_of_the_functions(interleaved):
    tensors = [t.requires_grad_() for t in drawn(torch.float64, count=5)]
    x, w, wo, bias, last_bias = tensors
    rope = None if interleaved is None else angles_of(5, torch.float64)
    residual = torch.randn_like(x).requires_grad_()
    words = dict(rope=rope, rope_interleaved=bool(interleaved), is_causal=True)
    y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, qkv_bias=bias, out_bias=last_bias, residual=residual, **words)
    right = right_of(x, w, wo, 4, 2, bias, last_bias, residual, rope=rope, interleaved=bool(interleaved), causal=True)[0]
    close(y, right)
    dy = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, [*tensors, residual], dy), torch.autograd.grad(right, [*tensors, residual], dy)):
        close(ours, theirs, 10.0)


def test_under_autocast():
    x, w, wo, bias, last_bias = drawn(torch.float32, count=5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = vt.attention_block(x, w, wo, heads=4, kv_heads=2, qkv_bias=bias, out_bias=last_bias)
    assert y.dtype == torch.bfloat16
    close(y, right_of(*(t.bfloat16() for t in (x, w, wo)), 4, 2, bias.bfloat16(), last_bias.bfloat16())[0], SLACK)


def test_within_a_compiled_function():
    x, w, wo, *_ = drawn(torch.float32, count=5)
    cache = caches(torch.float32, 2, 8, 2, False)
    eager = [c.clone() for c in cache]
    lengths = torch.full((2,), 5, dtype=torch.int32)

    def step(x, k, v):
        return vt.attention_block(x, w, wo, heads=4, kv_heads=2, k_cache=k, v_cache=v, kv_lengths=lengths, is_causal=True) + 1

    with torch.no_grad():
        close(torch.compile(step, backend="aot_eager")(x, *cache), step(x, *eager).double(), 1.0)
    for one, other in zip(cache, eager):
        assert torch.equal(one, other)


def test_what_does_not_fit_is_refused():
    x, w, wo, bias, _ = drawn(torch.float32)
    k, v = caches(torch.float32, 2, 8, 2, False)
    lengths = torch.full((2,), 5, dtype=torch.int32)
    rope = angles_of(5, torch.float32)

    def refused(words, kind=(vd.GraphError, vd.BindingError), x=x, w=w, wo=wo, **options):
        options = {"heads": 4, "kv_heads": 2, **options}
        with torch.no_grad(), pytest.raises(kind, match=words):
            vt.attention_block(x, w, wo, **options)

    refused("three dims", x=x[0])
    refused("64 outputs for 5 heads of queries", heads=5)
    refused("all three are given", k_cache=k, v_cache=v)
    refused("all three are given", kv_lengths=lengths)
    refused("of one floating-point type", w=w.double())
    refused("of one floating-point type", k_cache=k.half(), v_cache=v.half(), kv_lengths=lengths)
    refused("they are i32", k_cache=k, v_cache=v, kv_lengths=lengths.long())
    refused("room for the new positions", k_cache=k[:, :4], v_cache=v[:, :4], kv_lengths=lengths)
    refused("angles of dims", rope=tuple(angle[:, :4] for angle in rope))
    refused("cosines and sines", rope=rope[:1])
    refused("of bool or added", attn_mask=torch.ones(5, 5, dtype=torch.int32))
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        vt.attention_block(x.clone().requires_grad_(), w, wo, heads=4, kv_heads=2, k_cache=k, v_cache=v, kv_lengths=lengths)
    y = vt._ops._namespace.attention_block.default(x.clone().requires_grad_(), w, None, wo, *[None] * 9, "scale=0.5 heads=4 kv_heads=2")
    with pytest.raises(vd.UnsupportedError, match="of inference"):
        y.sum().backward()


MISFITS = {
    "features": (dict(x=(2, 5, 23)), "24 features and x has 23"),
    "heads": (dict(kv_heads=3, w=(80, 24)), "4 heads of queries and 3 of keys"),
    "outputs": (dict(heads=6), "64 outputs for 6 heads of queries"),
    "values": (dict(wo=(10, 31)), "takes 31 values and 4 heads of 8 elements have 32"),
    "a weight of three dims": (dict(w=(64, 24, 1)), "qkv_weight of"),
    "a weight of one dim": (dict(wo=(32,)), "out_weight of"),
    "a bias": (dict(qkv_bias=(63,)), "qkv_bias of"),
    "the last bias": (dict(out_bias=(9,)), "out_bias of"),
    "a residual": (dict(residual=(3, 5, 10)), "residual of"),
    "positions of angles": (dict(rope=(1, 4, 8)), "angles of dims"),
    "a batch of angles": (dict(rope=(3, 5, 8)), "angles of dims"),
    "elements of angles": (dict(rope=(1, 5, 6)), "angles of dims"),
    "dims of angles": (dict(rope=(5, 8)), "angles of dims"),
    "a mask": (dict(attn_mask=(5, 4)), "attn_mask of"),
    "a mask of another batch": (dict(attn_mask=(3, 1, 5, 5)), "attn_mask of"),
    "slopes": (dict(alibi_slopes=(3,)), "alibi_slopes of"),
    "slopes of three dims": (dict(alibi_slopes=(2, 4, 1)), "alibi_slopes of"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_dims_that_do_not_fit_are_one_error_with_gradients_and_without(name):
    told, words = MISFITS[name]
    options = {name: torch.randn(given) if isinstance(given, tuple) else given for name, given in told.items()}
    if "rope" in options:
        options["rope"] = (options["rope"],) * 2
    options = {"x": torch.randn(2, 5, 24), "w": torch.randn(64, 24), "wo": torch.randn(10, 32), "heads": 4, "kv_heads": 2, **options}
    x, w, wo = (options.pop(name) for name in ("x", "w", "wo"))
    said = []
    for is_wanted in (False, True):
        with pytest.raises(vd.GraphError, match=words) as error:
            vt.attention_block(x.clone().requires_grad_(is_wanted), w, wo, **options)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_multi_head_attention_is_one_call(batch_first, has_bias):
    plain = nn.MultiheadAttention(24, 3, bias=has_bias, batch_first=batch_first).eval()
    ours, _ = vt.convert(plain)
    wide = nn.MultiheadAttention(24, 3, bias=has_bias, batch_first=batch_first).double().eval()
    wide.load_state_dict(plain.state_dict())
    for parameter in (*ours.parameters(), *wide.parameters()):
        parameter.requires_grad_(False)
    x = torch.randn(2, 7, 24) if batch_first else torch.randn(7, 2, 24)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    for words in ({}, dict(key_padding_mask=padding), dict(attn_mask=causal), dict(attn_mask=causal, is_causal=True)):
        double = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in words.items()}
        made = []
        assert calls_of(lambda: made.append(ours(x, x, x, need_weights=False, **words)[0])) == ["attention_block"], words
        close(made[0], wide(x.double(), x.double(), x.double(), need_weights=False, **double)[0], SLACK)
    # Cross-attention stays what it was.
    other = torch.randn_like(x)
    assert "attention" in calls_of(lambda: ours(x, other, other, need_weights=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TYPES[1:])
def test_steps_on_a_gpu_are_captured_and_append_in_place(dtype):
    heads, kv_heads, d, room, count = 8, 2, 64, 96, 40
    x, w, wo, bias, _ = drawn(dtype, heads, kv_heads, batch=3, count=count, elements=d)
    rope = angles_of(count, dtype, d)
    right, keys, _ = right_of(x, w, wo, heads, kv_heads, bias, rope=rope, causal=True)
    k_cache, v_cache = (torch.full((3, room, kv_heads, d), 50.0, dtype=dtype, device="cuda") for _ in range(2))
    x, w, wo, bias = (t.cuda() for t in (x, w, wo, bias))
    cos, sin = (angle.cuda() for angle in rope)
    lengths = torch.full((3,), count - 4, dtype=torch.int32, device="cuda")
    words = dict(heads=heads, kv_heads=kv_heads, qkv_bias=bias, is_causal=True, k_cache=k_cache, v_cache=v_cache, kv_lengths=lengths)
    with torch.no_grad():
        first = slice(0, count - 4)
        close(vt.attention_block(x[:, first], w, wo, rope=(cos[:, first], sin[:, first]), **words), right[:, first], SLACK)
        one, angle = x[:, :1].clone(), [t[:, :1].clone() for t in (cos, sin)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            lengths.add_(1)
            vt.attention_block(one, w, wo, rope=angle, **words)
            lengths.sub_(1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lengths.add_(1)
            y = vt.attention_block(one, w, wo, rope=angle, **words)
        for place in range(count - 4, count):
            part = slice(place, place + 1)
            one.copy_(x[:, part])
            for to, of in zip(angle, (cos, sin)):
                to.copy_(of[:, part])
            graph.replay()
            close(y, right[:, part], SLACK)
    close(k_cache[:, :count], keys, 2.0)
    assert bool((k_cache[:, count:] == 50).all())


@pytest.mark.parametrize("heads, kv_heads, name", [(0, None, "heads is 0"), (-4, 2, "heads is -4"), (4, 0, "kv_heads is 0")])
@pytest.mark.parametrize("is_trained", [False, True])
def test_counts_of_heads_are_named(heads, kv_heads, name, is_trained):
    x, w, wo = (torch.randn(shape, requires_grad=is_trained) for shape in ((2, 5, 8), (24, 8), (8, 8)))
    with pytest.raises(vd.GraphError, match=name):
        vt.attention_block(x, w, wo, heads=heads, kv_heads=kv_heads)
