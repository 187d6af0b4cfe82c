"""Hugging Face's modules by this package: which are taken and why not, results and gradients against the plain network in f64, and what else is done with a network."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")

import verdigris.torch as vt
from conftest import close, error_of
from test_torch_chains import nodes_of
from torch import nn
from verdigris.torch import _transformers

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)


def calls_of(work):
    """The package's operators that some work calls, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return [event.name.removeprefix("verdigris::") for event in profile.events() if event.name.startswith("verdigris::")]


def llama(kind="Llama", **words):
    words = {
        **dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0),
        **words,
    }
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**words, attn_implementation="sdpa"))


def vit(**words):
    words = {**dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=16, num_labels=5), **words}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**words, attn_implementation="sdpa"))


def converted(model):
    """A copy of its own weights, converted, that attends by this package."""
    ours, report = vt.convert(copy.deepcopy(model))
    ours.set_attn_implementation(vt.register_transformers())
    return ours, report


def randomized(model):
    """With vectors that are neither 0 nor 1."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) / 4)
    return model


def tokens_of(model, batch=2, count=9):
    return torch.randint(1, model.config.vocab_size, (batch, count))


def check_gradients(model, wide, slack=1.0):
    for (name, parameter), right in zip(model.named_parameters(), wide.parameters()):
        assert (parameter.grad is None) == (right.grad is None), name
        if right.grad is not None and right.grad.abs().max() > 1e-12:
            assert error_of(parameter.grad, right.grad) <= slack * 1e-4, name


FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_decoder_computes_what_it_did(kind):
    plain = randomized(llama(kind, **FAMILIES[kind])).eval()
    ours, report = converted(plain)
    wide = copy.deepcopy(plain).double()
    assert report.swapped["model.layers.0.self_attn"] == f"{kind}Attention" and report.swapped["model.layers.1.mlp"] == f"{kind}MLP"
    assert report.swapped["model.norm"] == f"{kind}RMSNorm" and set(report.kept) == {"model.embed_tokens", "model.rotary_emb"}
    tokens = tokens_of(plain)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    kept = mask.bool()
    for given in (None, mask):
        rows = kept if given is not None else torch.ones_like(kept)
        with torch.no_grad():
            close(ours(tokens, attention_mask=given).logits[rows], wide(tokens, attention_mask=given).logits[rows], 20.0)
        ours.zero_grad(), wide.zero_grad()
        for model in (ours, wide):
            model.train()
            model(tokens, attention_mask=given, labels=tokens.where(kept, -100), use_cache=given is None).loss.backward()
        check_gradients(ours, wide)


def test_calls_of_a_layer():
    ours, _ = converted(llama().eval())
    tokens = tokens_of(ours)
    layer = ["norm", "linear", "rotary", "attention", "fused", "norm", "gated_mlp_inference"]
    whole = ["norm", "attention_block", "norm", "gated_mlp_inference"]
    with torch.no_grad():
        # A cache that makes new tensors stands between the projections and attention.
        assert calls_of(lambda: ours(tokens)) == [*layer * 2, "norm", "linear"]
        assert calls_of(lambda: ours(tokens, use_cache=False)) == [*whole * 2, "norm", "linear"]
        cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
        assert calls_of(lambda: ours(tokens, cache=cache, use_cache=True)) == [*layer * 2, "norm", "linear"]
        assert calls_of(lambda: ours(tokens[:, :1], cache=cache, use_cache=True)) == [*whole * 2, "norm", "linear"]
        assert [int(layer.cumulative_length) for layer in cache.layers] == [10, 10]
    loss = ours(tokens, labels=tokens).loss
    back = ["gated_mlp_backward", "gradient", "gradient", "attention_backward", "rotary", "rotary", "gradient", "gradient"]
    assert calls_of(loss.backward) == ["gradient", "gradient", *back * 2]


def test_a_layer_whose_parts_are_seen_or_of_another_kind():
    plain = randomized(llama()).eval()
    wide, tokens = copy.deepcopy(plain).double(), tokens_of(plain)
    with torch.no_grad():
        right = wide(tokens).logits
        for parts in (("self_attn",), ("self_attn.o_proj", "mlp.down_proj"), ("mlp",), ("input_layernorm",), ()):
            ours, seen = converted(plain)[0], []
            for part in parts:
                ours.model.layers[0].get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
            close(ours(tokens).logits, right, 20.0)
            assert len(seen) == len(parts)
        # Parts of a type of their own, and a layer that is called otherwise.
        ours, report = converted(plain)
        assert report.swapped["model.layers.0"] == "LlamaDecoderLayer"
        ours.model.layers[1].self_attn.o_proj = nn.Sequential(ours.model.layers[1].self_attn.o_proj)
        ours.model.layers[0].mlp.down_proj = nn.Sequential(ours.model.layers[0].mlp.down_proj)
        close(ours(tokens).logits, right, 20.0)
        x = torch.randn(2, 9, 32)
        angles = ours.model.rotary_emb(x, torch.arange(9)[None])
        close(ours.model.layers[0](x, position_embeddings=angles), plain.model.layers[0](x, position_embeddings=angles).double(), 10.0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sum_that_is_a_step_of_a_product_has_gradients(has_bias):
    from verdigris.torch._decoder import linear_add

    draw = lambda *dims: torch.randn(*dims, dtype=torch.float64, requires_grad=True)
    given = [draw(2, 3, 6), draw(5, 6), *([draw(5)] if has_bias else []), draw(2, 3, 5)]
    add = lambda x, w, *rest: linear_add(x, w, rest[0] if has_bias else None, rest[-1])
    close(add(*given), nn.functional.linear(given[0], given[1], given[2] if has_bias else None) + given[-1], 1.0)
    assert torch.autograd.gradcheck(add, given) and torch.autograd.gradgradcheck(add, given)
    bf16 = [value.detach().bfloat16() for value in given]
    close(add(*bf16), add(*(value.double() for value in bf16)), 1.0)


def test_tokens_are_those_of_the_plain_network():
    plain = randomized(llama()).eval()
    ours, _ = converted(plain)
    tokens = tokens_of(plain)
    for words in ({}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}, {"num_beams": 2}):
        made = [model.generate(tokens, max_new_tokens=5, do_sample=False, **words) for model in (plain, ours)]
        assert torch.equal(*made), words


def test_a_token_behind_a_static_cache_reads_the_keys_before_it(monkeypatch):
    plain = randomized(llama()).eval()
    ours, _ = converted(plain)
    tokens, made = tokens_of(plain, 2, 7), []
    padding = torch.ones(2, 8, dtype=torch.int64)
    padding[1, :2] = 0
    for is_padded in (False, True):
        for model in (plain.double(), ours):
            cache = transformers.StaticCache(config=model.config, max_cache_len=12)
            beside = dict(attention_mask=padding[:, :7]) if is_padded else {}
            with torch.no_grad():
                model(tokens, cache=cache, use_cache=True, **beside)
                for layer in cache.layers:
                    # What lies behind is no key.
                    layer.keys[:, :, 8:], layer.values[:, :, 8:] = 50.0, float("nan") if model is ours and not is_padded else 50.0
                if model is ours and not is_padded:
                    monkeypatch.setattr(vt.functional, "attention_of_heads", None)
                beside = dict(attention_mask=padding) if is_padded else {}
                made.append(model(tokens[:, :1], cache=cache, use_cache=True, **beside).logits)
                monkeypatch.undo()
        close(made[-1], made[-2], 30.0)


def test_a_vit_computes_what_it_did():
    plain = randomized(vit()).eval()
    ours, report = converted(plain)
    assert report.swapped["vit.layers.0.attention"] == "ViTAttention" and "vit.layers.1.mlp" in report.chains and not report.kept
    wide, images, labels = copy.deepcopy(plain).double(), torch.randn(2, 3, 32, 32), torch.tensor([1, 4])
    with torch.no_grad():
        close(ours(images).logits, wide(images.double()).logits, 20.0)
        layer = ["norm", "attention_block", "norm", "mlp_inference"]
        assert calls_of(lambda: ours(images)) == ["conv_fprop", *layer * 2, "norm", "linear"]
    ours(images, labels=labels).loss.backward()
    wide(images.double(), labels=labels).loss.backward()
    check_gradients(ours, wide)


def test_bf16_rounds_no_more_than_the_plain_network():
    plain = randomized(llama(hidden_size=64, intermediate_size=96)).bfloat16()
    ours, _ = converted(plain)
    wide, tokens = copy.deepcopy(plain).double(), tokens_of(plain, 4, 24)
    for model in (plain, ours, wide):
        model.eval()
        model(tokens, labels=tokens).loss.backward()
    norm = lambda model: sum(float((p.grad.double() - right.grad).norm()) ** 2 for p, right in zip(model.parameters(), wide.parameters()))
    assert norm(ours) <= 1.25**2 * norm(plain)
    assert all(p.grad.dtype == torch.bfloat16 for p in ours.parameters())


def test_under_autocast_results_are_of_its_type_and_gradients_of_the_parameters():
    plain = randomized(llama())
    ours, _ = converted(plain)
    wide, tokens = copy.deepcopy(plain).double(), tokens_of(plain)
    wide(tokens, labels=tokens).loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        made = ours(tokens, labels=tokens)
    made.loss.backward()
    assert made.logits.dtype == torch.bfloat16
    for (name, parameter), right in zip(ours.named_parameters(), wide.parameters()):
        assert parameter.grad.dtype == torch.float32 and error_of(parameter.grad, right.grad) < 0.05, name


def test_checkpoints_and_frozen_parameters():
    plain = randomized(llama()).train()
    ours, _ = converted(plain)
    tokens = tokens_of(plain)
    ours(tokens, labels=tokens).loss.backward()
    right = [parameter.grad.clone() for parameter in ours.parameters()]
    ours.zero_grad()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours(tokens, labels=tokens, use_cache=False).loss.backward()
    for parameter, before in zip(ours.parameters(), right):
        close(parameter.grad, before.double(), 10.0)
    ours.gradient_checkpointing_disable()
    # Some of the three weights alone, as adapters train them.
    ours.zero_grad()
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_("k_proj" in name or "up_proj" in name)
    ours(tokens, labels=tokens).loss.backward()
    for (name, parameter), before in zip(ours.named_parameters(), right):
        assert (parameter.grad is not None) == ("k_proj" in name or "up_proj" in name), name
        if parameter.grad is not None:
            close(parameter.grad, before.double(), 10.0)


def parts_are_together(module):
    places = [getattr(module, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    return module._packed() is not None and all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in zip(places, places[1:]))


def test_weights_lie_together_and_stay_parameters(tmp_path):
    plain = randomized(llama("Qwen2")).eval()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    ours, _ = vt.convert(plain)
    attention, tokens = ours.model.layers[0].self_attn, tokens_of(plain)
    assert parts_are_together(attention) and attention._packed()[1] is not None
    # Parameters are shared with the original, whose results are what they were.
    assert all(a is b for a, b in zip(plain.parameters(), ours.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items()) and list(ours.state_dict()) == list(before)
    with torch.no_grad():
        right = plain(tokens).logits
        close(ours(tokens).logits, right.double(), 20.0)
    # What is changed in place is what the product reads.
    with torch.no_grad():
        attention.k_proj.weight.mul_(1.5)
        close(ours(tokens).logits, copy.deepcopy(plain).double()(tokens).logits, 20.0)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours).double().float()):
        assert parts_are_together(other.model.layers[1].self_attn) and type(other.model.layers[0].mlp).__name__ == "Qwen2MLP"
        with torch.no_grad():
            assert torch.equal(other(tokens).logits, ours(tokens).logits)
        assert other.model.layers[0].self_attn.k_proj.weight.data_ptr() != attention.k_proj.weight.data_ptr()
    ours.save_pretrained(tmp_path)
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), ours.state_dict().values()))
    ours.load_state_dict(before)
    with torch.no_grad():
        close(ours(tokens).logits, right.double(), 20.0)
    # Moved apart: three products, and the same result.
    for module in ours.model.layers:
        module.self_attn.v_proj.weight.data = module.self_attn.v_proj.weight.data.clone()
    with torch.no_grad():
        close(ours(tokens).logits, right.double(), 20.0)
        apart = calls_of(lambda: ours(tokens))
    assert apart[:9] == ["norm", "linear", "linear", "linear", "rotary", "rotary", "fused", "norm", "gated_mlp_inference"]


def test_hooks_see_what_they_did():
    ours, _ = converted(llama().eval())
    seen, tokens = [], tokens_of(ours)
    layer = ours.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj, layer.mlp.act_fn, layer.self_attn, layer.mlp, layer.input_layernorm):
        module.register_forward_hook(lambda module, given, result: seen.append(type(module).__name__))
    with torch.no_grad():
        right = copy.deepcopy(ours)
        ours(tokens)
    assert seen == ["LlamaRMSNorm", "Linear", "LlamaAttention", "SiLUActivation", "Linear", "LlamaMLP"]
    assert ours(tokens, output_hidden_states=True).hidden_states[1].shape == (2, 9, 32)
    ours.set_attn_implementation("eager")
    assert ours(tokens, output_attentions=True).attentions[1].shape == (2, 4, 9, 9)
    assert right is not ours


def test_conversion_of_a_converted_network_and_of_parts():
    plain = llama().eval()
    once, _ = vt.convert(plain)
    twice, report = vt.convert(once)
    tokens = tokens_of(plain)
    with torch.no_grad():
        assert torch.equal(once(tokens).logits, twice(tokens).logits)
    assert not report.swapped and parts_are_together(twice.model.layers[0].self_attn)
    _, skipped = vt.convert(plain, skip=["model.layers.0"])
    assert not any(name.startswith("model.layers.0") for name in skipped.swapped) and "model.layers.1.mlp" in skipped.swapped
    _, some = vt.convert(plain, only=[nn.Linear])
    assert set(some.swapped.values()) == {"Linear"}
    _, norms = vt.convert(plain, only=[type(plain.model.norm)])
    assert set(norms.swapped.values()) == {"LlamaRMSNorm"} and len(norms.swapped) == 5


def test_a_compiled_decoder():
    plain = randomized(llama()).eval()
    ours, _ = converted(plain)
    tokens = tokens_of(plain)
    with torch.no_grad():
        made = torch.compile(ours, backend="aot_eager", fullgraph=True)(tokens, use_cache=False).logits
        close(made, copy.deepcopy(plain).double()(tokens).logits, 20.0)
    torch._dynamo.reset()


class DoublingNorm(nn.Module):
    __module__ = "transformers.models.doubling"

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def changed(base, change):
    """A class of transformers' with another forward."""
    body = {"forward": lambda self, *inputs, **options: change(base.forward(self, *inputs, **options)), "__module__": base.__module__}
    return type(base.__name__, (base,), body)


def test_what_computes_something_else_stays():
    _, report = vt.convert(nn.Sequential(DoublingNorm()))
    assert report.kept["0"] == "DoublingNorm: a trial of its forward gives another result"
    plain = llama()
    layer = plain.model.layers[0]
    layer.mlp.__class__ = changed(type(layer.mlp), lambda y: y * 1.001)
    layer.input_layernorm.__class__ = changed(type(layer.input_layernorm), lambda y: y * 1.001)
    layer.self_attn.__class__ = changed(type(layer.self_attn), lambda y: y)
    plain.model.layers[1].__class__ = changed(type(layer), lambda y: y)
    plain.model.layers[1].mlp.gate_proj = nn.Sequential(plain.model.layers[1].mlp.gate_proj)
    _, report = vt.convert(plain)
    assert "trial" in report.kept["model.layers.0.mlp"] and "trial" in report.kept["model.layers.0.input_layernorm"]
    assert "other arguments" in report.kept["model.layers.0.self_attn"] and "model.layers.1" not in report.swapped and "Linear" in report.kept["model.layers.1.mlp"]
    biased = llama(mlp_bias=True)
    assert "biases" in vt.convert(biased)[1].kept["model.layers.0.mlp"]


@pytest.mark.parametrize("kind, words", [("Qwen3", {"head_dim": 8}), ("Gemma", {"head_dim": 8}), ("Cohere", {}), ("Glm", {"head_dim": 8})])
def test_families_that_differ_compute_what_they_did(kind, words):
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip("not in this transformers")
    plain = randomized(llama(kind, **words)).eval()
    ours, report = converted(plain)
    tokens = tokens_of(plain)
    assert not any(name.endswith("self_attn") for name in report.swapped) or kind in ("Gemma",), report
    with torch.no_grad():
        close(ours(tokens).logits, copy.deepcopy(plain).double()(tokens).logits, 30.0)


def test_a_cache_by_its_former_name():
    """Attention as transformers had it before the cache was told what attention was given."""
    room = transformers.models.llama.modeling_llama

    class Former(room.LlamaAttention):
        __module__ = room.__name__

        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
            heads = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (layer(hidden_states).view(heads).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
            q, k = room.apply_rotary_pos_emb(q, k, *position_embeddings)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            attend = room.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, room.eager_attention_forward)
            dropout = 0.0 if not self.training else self.attention_dropout
            o, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
            return self.o_proj(o.reshape(*heads[:-2], -1).contiguous()), weights

    plain = randomized(llama()).eval()
    theirs = plain.model.layers[0].self_attn
    theirs.__class__ = Former
    ours, report = vt.convert(theirs)
    assert report.swapped[""] == "Former", report
    x = torch.randn(2, 5, plain.config.hidden_size)
    angles = plain.model.rotary_emb(x, torch.arange(5)[None])
    caches = [transformers.DynamicCache(config=plain.config) for _ in range(2)]
    with torch.no_grad():
        made = [module(x, position_embeddings=angles, past_key_values=cache)[0] for module, cache in zip((theirs, ours), caches)]
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(*(cache.layers[:1] for cache in caches)):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)


def test_trials_draw_nothing_from_the_generators_of_programs():
    plain = llama()
    torch.manual_seed(3)
    right = torch.rand(3)
    torch.manual_seed(3)
    vt.convert(plain)
    assert torch.equal(torch.rand(3), right)


# The functions.


def turned(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [2, 6, 64])
def test_rotary_embedding(dtype, elements):
    q, k = (torch.randn(2, 5, heads, elements, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2))
    # The halves' angles differ, so that each sine has to be its own.
    for cos, sin in ((torch.randn(5, elements, dtype=dtype), torch.randn(5, elements, dtype=dtype)), (torch.randn(2, 1, 5, elements, dtype=dtype),) * 2):
        made = vt.rotary_embedding(q, k, cos, sin)
        wide = [x.detach().double().requires_grad_() for x in (q, k)]
        for y, x, given in zip(made, wide, (q, k)):
            right = turned(x, cos.double(), sin.double())
            close(y, right, 4.0)
            assert y.stride() == given.stride() and y.dtype == dtype
            dy = torch.randn_like(y)
            close(torch.autograd.grad(y, given, dy, retain_graph=True)[0], torch.autograd.grad(right, x, dy.double())[0], 4.0)
    one = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    angles = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
    turn = lambda x: vt.rotary_embedding(x, x, *angles)[0]
    assert torch.autograd.gradcheck(turn, one) and torch.autograd.gradgradcheck(turn, one)


def test_rotary_embedding_of_what_does_not_fit():
    x, angle = torch.randn(2, 3, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match="angles of dims"):
        vt.rotary_embedding(x, x, angle, torch.randn(3, 2))
    odd = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="angles of dims"):
        vt.rotary_embedding(odd, odd, torch.randn(3, 5), torch.randn(3, 5))
    with pytest.raises(vt.functional.UnsupportedError, match="no variables"):
        vt.rotary_embedding(x, x, angle.requires_grad_(), angle)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_gated_mlp(dtype, activation):
    x = torch.randn(3, 4, 24, dtype=dtype, requires_grad=True)
    gate, up, down = (torch.randn(*dims, dtype=dtype).div_(4).requires_grad_() for dims in ((40, 24), (40, 24), (16, 40)))
    given = (x, gate, up, down)
    wide = [value.detach().double().requires_grad_() for value in given]
    f = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu, "sigmoid": torch.sigmoid}.get(
        activation, lambda x: nn.functional.gelu(x, approximate="tanh")
    )
    right = nn.functional.linear(f(nn.functional.linear(wide[0], wide[1])) * nn.functional.linear(wide[0], wide[2]), wide[3])
    made = vt.gated_mlp(*given, activation=activation)
    close(made, right, 8.0)
    with torch.no_grad():
        close(vt.gated_mlp(*given, activation=activation), right, 8.0)
    dy = torch.randn_like(made)
    rights = torch.autograd.grad(right, wide, dy.double())
    for number in range(1, 16):
        asked = [place for place in range(4) if number >> place & 1]
        found = torch.autograd.grad(made, [given[place] for place in asked], dy, retain_graph=True)
        for place, gradient in zip(asked, found):
            close(gradient, rights[place], 8.0)


def test_gated_mlp_has_gradients_of_gradients_and_refusals():
    given = [torch.randn(*dims, dtype=torch.float64, requires_grad=True) for dims in ((2, 3), (4, 3), (4, 3), (2, 4))]
    assert torch.autograd.gradcheck(vt.gated_mlp, given)
    assert torch.autograd.gradgradcheck(lambda *given: vt.gated_mlp(*given, activation="relu"), given)
    with pytest.raises(ValueError, match="outputs"):
        vt.gated_mlp(given[0], given[1], given[2][:3], given[3])
    with pytest.raises(ValueError, match="one floating-point type"):
        vt.gated_mlp(given[0], given[1].float(), given[2], given[3])
    with pytest.raises(ValueError, match="activation"):
        vt.gated_mlp(*given, activation="swish")


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_that_is_written_between_two_backwards_is_noticed(has_bias):
    """Packed weights are memory of the parameters, whose versions autograd checks all the same."""
    model = randomized(llama(attention_bias=has_bias))
    ours, _ = converted(model)
    names = nodes_of(ours(tokens_of(model)).logits)
    assert any("Projections" in name for name in names)
    for net in (model, ours):
        optimizer = torch.optim.SGD([net.model.layers[1].self_attn.k_proj.weight], lr=0.1)
        loss = net(tokens_of(model)).logits.square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
