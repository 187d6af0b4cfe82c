"""Attention in networks: `nn.MultiheadAttention` under `convert`, programs that call PyTorch's function, and Hugging Face's transformers."""

import copy
import itertools
import threading

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris as vd
import verdigris.torch as vt
from verdigris.torch import _sdpa
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)


def calls_of(function):
    """The operators of this package that a function's calls reach."""
    with torch.profiler.profile() as profile:
        function()
    return sorted(event.key for event in profile.key_averages() if event.key.startswith("verdigris::") for _ in range(event.count))


def step(module, inputs, weight, **options):
    """The result of a module, and the gradients of inputs and parameters."""
    for parameter in module.parameters():
        parameter.grad = None
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs}
    y, weights = module(*(leaves[id(x)] for x in inputs), **options)
    assert weights is None
    (y * weight).sum().backward()
    return [y, *(x.grad for x in leaves.values()), *(p.grad for p in module.parameters() if p.grad is not None)]


SHAPES = [dict(), dict(kdim=12, vdim=20), dict(bias=False)]


@pytest.mark.parametrize("shape, first, batched, shared", itertools.product(SHAPES, [False, True], [False, True], ["all", "keys", "none"]))
def test_multihead_attention(shape, first, batched, shared):
    if "kdim" in shape and shared != "none":
        pytest.skip("keys and values have another size than queries")
    theirs = nn.MultiheadAttention(16, 4, batch_first=first, **shape)
    ours, report = vt.convert(theirs)
    assert report.swapped[""] == "MultiheadAttention" and list(ours.state_dict()) == list(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()

    def tensor(positions, size):
        dims = [positions] if not batched else [3, positions] if first else [positions, 3]
        return torch.randn(*dims, size)

    query = tensor(5, 16)
    key = query if shared == "all" else tensor(7, shape.get("kdim", 16))
    value = key if shared != "none" else tensor(7, shape.get("vdim", 16))
    weight = torch.randn_like(query)
    got = step(ours, (query, key, value), weight, need_weights=False)
    same = {id(x): x.double() for x in (query, key, value)}
    right = step(wide, tuple(same[id(x)] for x in (query, key, value)), weight.double(), need_weights=False)
    assert len(got) == len(right)
    for mine, want in zip(got, right):
        close(mine, want, 20.0)
    x = [query, key, value]
    assert "verdigris::attention" in calls_of(lambda: ours(*x, need_weights=False))


def masks(queries, keys):
    left_out = torch.rand(queries, keys) < 0.3
    left_out[:, 0] = False
    padding = torch.zeros(3, keys, dtype=torch.bool)
    padding[1, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(keys)
    added = lambda mask: torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
    yield dict(attn_mask=left_out)
    yield dict(attn_mask=torch.randn(queries, keys))
    yield dict(attn_mask=torch.randn(12, queries, keys))
    yield dict(key_padding_mask=padding)
    yield dict(key_padding_mask=added(padding), attn_mask=added(left_out))
    yield dict(key_padding_mask=padding, attn_mask=left_out)
    yield dict(attn_mask=causal, is_causal=True)
    yield dict(attn_mask=causal, is_causal=True, key_padding_mask=added(padding))


def test_multihead_attention_with_masks():
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    ours, _ = vt.convert(theirs)
    wide = copy.deepcopy(theirs).double()
    x, weight = torch.randn(3, 6, 16), torch.randn(3, 6, 16)
    for options in masks(6, 6):
        widened = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in options.items()}
        got = step(ours, (x, x, x), weight, need_weights=False, **options)
        right = step(wide, (xd := x.double(), xd, xd), weight.double(), need_weights=False, **widened)
        for mine, want in zip(got, right):
            close(mine, want, 20.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multihead_attention_of_padding_alone(dtype, is_causal):
    """A sequence that is padding alone, or whose first queries see padding alone: PyTorch gives NaN there. Ours gives the output projection of 0, and gradients as if these queries were not there."""
    ours = vt.convert(nn.MultiheadAttention(16, 4, batch_first=True))[0].to(dtype)
    x = torch.randn(3, 6, 16).to(dtype).requires_grad_()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0], padding[1, :2], padding[2, 4:] = True, True, True
    told = dict(attn_mask=nn.Transformer.generate_square_subsequent_mask(6), is_causal=True) if is_causal else {}
    y, _ = ours(x, x, x, key_padding_mask=padding, need_weights=False, **told)
    d = torch.randn_like(y)
    y.backward(d)
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in ours.parameters())
    bias = ours.out_proj.bias.detach()
    assert torch.equal(y[0], bias.expand(6, 16)) and (x.grad[0] == 0).all()
    # By heads in f64, without the queries that see nothing.
    kept = ~padding[:, None, None] & (torch.ones(6, 6, dtype=torch.bool).tril() if is_causal else True)
    sees = kept.any(-1, keepdim=True)
    wide = copy.deepcopy(ours).double()
    wide.zero_grad()
    xd = x.detach().double().requires_grad_()
    q, k, v = F.linear(xd, wide.in_proj_weight, wide.in_proj_bias).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 2).masked_fill(~kept & sees, -torch.inf)
    o = (scores.softmax(-1) * sees) @ v
    truth = F.linear(o.transpose(1, 2).flatten(2), wide.out_proj.weight, wide.out_proj.bias)
    truth.backward(d.double())
    close(y, truth, 20.0)
    close(x.grad, xd.grad, 20.0)
    for one, right in zip(ours.parameters(), wide.parameters()):
        close(one.grad, right.grad, 20.0)


def attended(monkeypatch):
    """What stands beside the scores of each call of attention, and whether it is causal."""
    seen, own = [], _sdpa._ops.attention

    def attention(q, k, v, beside, *rest):
        seen.append((None if beside is None else tuple(beside.shape), "causal=top_left" in rest[-1], rest[3] is not None))
        return own(q, k, v, beside, *rest)

    monkeypatch.setattr(_sdpa._ops, "attention", attention)
    return seen


def test_a_causal_mask_beside_padding_is_not_read(monkeypatch):
    seen = attended(monkeypatch)
    ours, x = vt.convert(nn.MultiheadAttention(16, 4, batch_first=True))[0], torch.randn(3, 6, 16)
    causal, padding = nn.Transformer.generate_square_subsequent_mask(6), torch.zeros(3, 6, dtype=torch.bool)
    ours(x, x, x, key_padding_mask=padding, attn_mask=causal, is_causal=True, need_weights=False)
    assert seen == [((3, 1, 1, 6), True, False)]


def test_what_stays_with_pytorch_gives_what_it_gave():
    x = torch.randn(3, 6, 16)
    for words, options in [
        (dict(), dict(need_weights=True)),
        (dict(add_bias_kv=True), dict(need_weights=False)),
        (dict(add_zero_attn=True), dict(need_weights=False)),
    ]:
        theirs = nn.MultiheadAttention(16, 4, batch_first=True, **words)
        ours, _ = vt.convert(theirs)
        with torch.no_grad():
            y, weights = ours(x, x, x, **options)
            want, want_weights = theirs(x, x, x, **options)
        assert torch.equal(y, want) and (weights is None) == (want_weights is None)
    dropped = vt.convert(nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True))[0]
    assert "verdigris::attention" in calls_of(lambda: dropped(x, x, x, need_weights=False))
    torch.manual_seed(3)
    first = dropped(x, x, x, need_weights=False)[0]
    assert not torch.equal(dropped(x, x, x, need_weights=False)[0], first)
    torch.manual_seed(3)
    assert torch.equal(dropped(x, x, x, need_weights=False)[0], first)
    dropped.eval()
    assert torch.equal(dropped(x, x, x, need_weights=False)[0], dropped(x, x, x, need_weights=False)[0])
    assert "verdigris::attention" in calls_of(lambda: dropped(x, x, x, need_weights=False))
    with pytest.raises(RuntimeError, match="attn_mask"):
        vt.convert(nn.MultiheadAttention(16, 4))[0](x, x, x, need_weights=False, is_causal=True)


def test_multihead_attention_under_autocast():
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    ours, _ = vt.convert(theirs)
    x = torch.randn(3, 6, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, _ = ours(x, x, x, need_weights=False)
        assert y.dtype == torch.bfloat16
    close(y, copy.deepcopy(theirs).double()(*[x.double()] * 3, need_weights=False)[0], 3.0)


def test_sdpa_kernel_takes_over_and_gives_back():
    plain = F.scaled_dot_product_attention
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert calls_of(call) == []
    with vt.sdpa_kernel():
        assert calls_of(call) == ["verdigris::attention"]
        with vt.sdpa_kernel():
            close(call(), plain(q.double(), k.double(), v.double(), is_causal=True), 2.0)
        assert calls_of(call) == ["verdigris::attention"]
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)) == ["verdigris::attention"]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention is plain))
        thread.start(), thread.join()
        assert seen == [False]
    assert F.scaled_dot_product_attention is plain
    with pytest.raises(KeyError), vt.sdpa_kernel():
        raise KeyError
    assert F.scaled_dot_product_attention is plain


def test_sdpa_kernel_under_a_compiler_with_dropout():
    """A compiler is given PyTorch's own attention where there is dropout, and not the name that is ours within the context."""
    q = torch.randn(2, 4, 5, 8)
    torch._dynamo.reset()
    attend = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), backend="eager", fullgraph=True)
    with vt.sdpa_kernel():
        torch.manual_seed(3)
        y = attend(q)
        torch.manual_seed(3)
        close(y, torch.compile(lambda q: vt.scaled_dot_product_attention(q, q, q, dropout_p=0.5), backend="eager")(q).double())
    assert y.shape == q.shape and not torch.equal(y, F.scaled_dot_product_attention(q, q, q))


def test_a_network_that_calls_pytorch():
    """A decoder layer whose modules call the function."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    net, x = Block(), torch.randn(2, 9, 16)
    truth = copy.deepcopy(net).double()(x.double())
    ours, _ = vt.convert(net)
    with vt.sdpa_kernel():
        close(ours(x), truth, 4.0)


def llama(transformers, **words):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **words
    )
    return transformers.LlamaForCausalLM(config)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    assert vt.register_transformers() == "verdigris"
    model = llama(transformers).eval()
    tokens = torch.randint(0, 50, (2, 9))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :3] = 0
    wide = copy.deepcopy(model).double()
    # Its eager one gives NaN where a row is padding alone.
    wide.set_attn_implementation("sdpa")
    model.set_attn_implementation("verdigris")
    kept = attention_mask.bool()
    for mask in (None, attention_mask):
        got, want = model(tokens, attention_mask=mask), wide(tokens, attention_mask=mask)
        rows = kept if mask is not None else torch.ones_like(kept)
        close(got.logits[rows], want.logits[rows], 20.0)
    # Tokens one by one, with a cache, are those that come of the whole sequence.
    with torch.no_grad():
        assert calls_of(lambda: model(tokens)) == ["verdigris::attention"] * 2
        made = model.generate(tokens, attention_mask=attention_mask, max_new_tokens=4, do_sample=False)
        want = wide.generate(tokens, attention_mask=attention_mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(made, want)
    # Gradients.
    loss, wide_loss = model(tokens, labels=tokens).loss, wide(tokens, labels=tokens).loss
    loss.backward(), wide_loss.backward()
    for (name, parameter), right in zip(model.named_parameters(), wide.parameters()):
        assert (parameter.grad.double() - right.grad).abs().max() <= 1e-4 * right.grad.abs().max(), name


@pytest.mark.parametrize("side", ["right", "left", "holes", "all of one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_with_padding(monkeypatch, dtype, side):
    """A causal mask beside padding is `causal` and a mask of keys, in training too; a sequence that is padding alone gives numbers."""
    transformers = pytest.importorskip("transformers")
    vt.register_transformers()
    seen = attended(monkeypatch)
    model = llama(transformers).to(dtype).train()
    tokens, attention_mask = torch.randint(0, 50, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    if side == "right":
        attention_mask[1, 5:], attention_mask[2, 1:] = 0, 0
    elif side == "left":
        attention_mask[1, :5], attention_mask[2, :8] = 0, 0
    elif side == "holes":
        attention_mask[0, 2::3] = attention_mask[1, ::2] = 0
    else:
        attention_mask[1] = 0
    labels = tokens.masked_fill(attention_mask == 0, -100)
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("sdpa")
    model.set_attn_implementation("verdigris")
    got, want = (one(tokens, attention_mask=attention_mask, labels=labels) for one in (model, wide))
    assert seen == [((3, 1, 1, 9), True, False)] * 2
    kept = attention_mask.bool()
    slack = 20.0 if dtype == torch.float32 else 8.0
    close(got.logits[kept], want.logits[kept], slack)
    got.loss.backward(), want.loss.backward()
    assert got.logits.isfinite().all()
    for (name, parameter), right in zip(model.named_parameters(), wide.named_parameters()):
        allowed = 1e-4 if dtype == torch.float32 else 6e-2
        assert (parameter.grad.double() - right[1].grad).abs().max() <= allowed * right[1].grad.abs().max(), name
    # In inference a layer is one plan, which is told the same; tokens behind a cache have its whole mask.
    with torch.no_grad():
        close(model.eval()(tokens, attention_mask=attention_mask).logits[kept], wide.eval()(tokens, attention_mask=attention_mask).logits[kept], slack)
        first, whole = attention_mask[:, :6], tokens[:, :6]
        cache = model(whole, attention_mask=first, use_cache=True).past_key_values
        seen.clear()
        then = model(tokens[:, 6:], attention_mask=attention_mask, past_key_values=cache).logits
        assert seen == [((3, 1, 3, 9), False, False)] * 2
        close(then[kept[:, 6:]], wide(tokens, attention_mask=attention_mask).logits[:, 6:][kept[:, 6:]], slack)


def test_a_mask_of_transformers_that_is_written_to_is_read(monkeypatch):
    masking_utils = pytest.importorskip("transformers.masking_utils")
    vt.register_transformers()
    seen, make = attended(monkeypatch), masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["verdigris"]
    q, padding = torch.randn(2, 4, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    whole = torch.ones(5, 5, dtype=torch.bool).tril() & padding[:, None, None]
    told = dict(batch_size=2, q_length=5, kv_length=5, q_offset=0, kv_offset=0, attention_mask=padding)

    def attend(mask, want):
        o = _sdpa.transformers_attention(nn.Module(), q, q, q, mask)[0].transpose(1, 2)
        close(o, F.scaled_dot_product_attention(q.double(), q.double(), q.double(), want), 4.0)

    attend(mask := make(**told), whole)
    mask[:, :, :, 0] = whole[:, :, :, 0] = True
    mask[:, :, 4, 4] = whole[:, :, 4, 4] = True
    attend(mask, whole)
    # What is longer than the keys is of later ones, what is shorter leaves keys out.
    plain = torch.ones(5, 5, dtype=torch.bool).tril() & padding[:, None, None]
    attend(make(**{**told, "attention_mask": torch.cat([padding, padding], 1)}), plain)
    attend(make(**{**told, "attention_mask": padding[:, :3]}), plain & (torch.arange(5) < 3))
    with torch.inference_mode():
        attend(make(**told), plain)
    of_keys, of_pairs = ((2, 1, 1, 5), True, False), ((2, 1, 5, 5), False, False)
    assert seen == [of_keys, of_pairs, of_keys, of_keys, of_pairs]


def test_a_mask_that_tells_positions_without_an_offset_is_read(monkeypatch):
    # As versions before `q_length` and `q_offset` call it: two queries behind three keys.
    positions = torch.arange(3, 5)

    def theirs(*, batch_size, cache_position, kv_length, mask_function=None, attention_mask=None):
        before = torch.arange(kv_length) <= cache_position[:, None]
        return (before & attention_mask[:, None, None]).expand(batch_size, 1, -1, -1).clone()

    make = _sdpa._in_parts(theirs, None)
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    mask = make(batch_size=2, cache_position=positions, kv_length=5, attention_mask=padding)
    assert _sdpa.padding_of(mask, 2, 5) is None and _sdpa.lengths_of(mask) is None
    q, k = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 5, 8)
    o = _sdpa.transformers_attention(nn.Module(), q, k, k, mask)[0].transpose(1, 2)
    close(o, F.scaled_dot_product_attention(q.double(), k.double(), k.double(), mask), 4.0)


def test_a_mask_of_one_token_that_is_written_to_is_read():
    masking_utils = pytest.importorskip("transformers.masking_utils")
    vt.register_transformers()
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["verdigris"]
    mask = make(batch_size=1, q_length=1, kv_length=5, q_offset=3, kv_offset=0, attention_mask=None)
    if mask is None:
        pytest.skip("this version of transformers makes no mask for one token")
    assert _sdpa.lengths_of(mask).tolist() == [4]
    mask[..., 0] = False
    assert _sdpa.lengths_of(mask) is None
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 5, 8)
    o = _sdpa.transformers_attention(nn.Module(), q, k, k, mask)[0].transpose(1, 2)
    close(o, F.scaled_dot_product_attention(q.double(), k.double(), k.double(), mask), 4.0)


def test_transformers_of_one_new_token_has_gradients(monkeypatch):
    transformers = pytest.importorskip("transformers")
    vt.register_transformers()
    model = llama(transformers).eval()
    wide = copy.deepcopy(model).double()
    model.set_attn_implementation("verdigris")
    tokens = torch.randint(0, 50, (2, 5))
    seen, loss = attended(monkeypatch), {}
    for one in (model, wide):
        cache = transformers.StaticCache(config=model.config, max_cache_len=9)
        with torch.no_grad():
            one(tokens[:, :4], past_key_values=cache)
        seen.clear()
        loss[one] = one(tokens[:, 4:], past_key_values=cache).logits.square().sum()
        if one is model:
            assert seen == [(None, False, True)] * 2
        loss[one].backward()
    for (name, parameter), right in zip(model.named_parameters(), wide.parameters()):
        assert (parameter.grad.double() - right.grad).abs().max() <= 1e-4 * right.grad.abs().max(), name


def test_transformers_with_dropout():
    transformers = pytest.importorskip("transformers")
    vt.register_transformers()
    model = llama(transformers, attention_dropout=0.1).train()
    model.set_attn_implementation("verdigris")
    tokens = torch.randint(0, 50, (1, 5))
    draw = lambda seed: (torch.manual_seed(seed), model(tokens).logits)[1]
    first = draw(1)
    assert torch.equal(draw(1), first) and not torch.equal(draw(2), first)


def test_transformers_with_sinks():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GptOssForCausalLM"):
        pytest.skip("not in this transformers")
    vt.register_transformers()
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = transformers.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=2, sliding_window=4, pad_token_id=0, attn_implementation="eager", experts_implementation="eager")
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    wide = copy.deepcopy(model).double()
    model.set_attn_implementation("verdigris")
    tokens = torch.randint(1, 50, (2, 9))
    got, want = model(tokens, labels=tokens), wide(tokens, labels=tokens)
    close(got.logits, want.logits, 20.0)
    got.loss.backward(), want.loss.backward()
    for (name, parameter), right in zip(model.named_parameters(), wide.parameters()):
        if right.grad is not None and right.grad.abs().max() > 1e-12:
            assert (parameter.grad.double() - right.grad).abs().max() <= 1e-4 * right.grad.abs().max(), name
    # Tokens one by one, behind caches that grow and that do not.
    with torch.no_grad():
        assert calls_of(lambda: model(tokens)).count("verdigris::attention") == 2
        for cache in ("dynamic", "static"):
            made = model.generate(tokens, max_new_tokens=4, do_sample=False, cache_implementation=cache)
            assert torch.equal(made, wide.generate(tokens, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32])
def test_biases_of_positions_beside_a_mask(kind, is_causal):
    q, k, bias = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 5)
    mask = None if kind is None else torch.ones(2, 1, 5, 5).tril().bool()
    left_out = torch.zeros(5, 5, dtype=torch.bool) if mask is None else ~mask
    if kind is torch.float32:
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~mask, torch.finfo(torch.float32).min)
    if kind is None and is_causal:
        left_out = torch.ones(5, 5, dtype=torch.bool).triu(1)
    inputs = [x.clone().requires_grad_() for x in (q, k, bias)]
    o, _ = _sdpa.transformers_attention(nn.Module(), inputs[0], inputs[1], inputs[1], mask, is_causal=is_causal, position_bias=inputs[2])
    wide = [x.double().requires_grad_() for x in (q, k, bias)]
    truth = ((wide[0] @ wide[1].mT * 8**-0.5 + wide[2]).masked_fill(left_out, -torch.inf).softmax(-1) @ wide[1]).transpose(1, 2)
    close(o, truth, 4.0)
    d = torch.randn_like(truth)
    o.backward(d.float()), truth.backward(d)
    for one, right in zip(inputs, wide):
        close(one.grad, right.grad, 4.0)
