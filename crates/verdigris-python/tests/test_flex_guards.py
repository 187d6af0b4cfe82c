"""Traces that `flex_attention` keeps: when a function is traced again, when it is not, and that results follow what it reads in either case."""

import gc
import math
import threading
import types
import weakref

import pytest
import torch
from conftest import close

import verdigris as vd
import verdigris.torch as vt
from verdigris.torch import _flex, _flex_guards
from torch._subclasses.fake_tensor import FakeTensorMode
from verdigris.torch._flex_trace import Trace

_theirs = pytest.importorskip("torch.nn.attention.flex_attention")
BlockMask, create_block_mask = _theirs.BlockMask, _theirs.create_block_mask

TENSORS = [torch.randn(1, 2, 12, 8) for _ in range(3)]
PLACES = [torch.arange(size).reshape([size if axis == own else 1 for axis in range(4)]) for own, size in enumerate((1, 2, 12, 12))]
NUMBER, OTHER = 2.0, 3.0
SETTINGS = types.SimpleNamespace(number=2.0)


@pytest.fixture
def traced(monkeypatch):
    """Counts traces."""
    vt.clear_plans()
    count, own = [], Trace.call

    def call(self, *args):
        count.append(args[1])
        return own(self, *args)

    monkeypatch.setattr(Trace, "call", call)
    return count


def run(score_mod):
    """The result of a call, held against dense scores in f64 of what the function gives for tensors."""
    q, k, v = (x.double() for x in TENSORS)
    expected = score_mod(q @ k.mT * 8**-0.5, *PLACES).softmax(-1) @ v
    made = vt.flex_attention(*TENSORS, score_mod)
    close(made, expected, 4.0)
    return made


def test_a_function_is_traced_once(traced):
    slopes = torch.tensor([0.5, 0.25])

    def made(factor):
        return lambda score, b, h, q, kv: score * factor - slopes[h] * (q - kv).abs()

    function = made(2.0)
    for _ in range(3):
        run(function)
    # So is another one of the same code that reads the same.
    run(made(2.0))
    assert len(traced) == 1
    run(made(2))
    run(made(3.0))
    run(function)
    assert len(traced) == 3


def test_tensors_are_those_of_the_call(traced):
    slopes = torch.tensor([0.5, 0.25])

    def function(score, b, h, q, kv):
        return score + slopes[h] * kv

    first = run(function)
    slopes.mul_(-3)
    second = run(function)
    slopes = torch.tensor([-1.0, 1.0])
    run(function)
    assert len(traced) == 1 and not torch.equal(first, second)
    # Of other types and dims, and with gradients, it is another trace.
    slopes = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    run(function)
    slopes = torch.randn(3)
    run(function)
    slopes = torch.randn(3, requires_grad=True)
    q, k, v = TENSORS
    vt.flex_attention(q, k, v, function).sum().backward()
    assert len(traced) == 4 and slopes.grad.abs().sum() > 0


def test_two_tensors_may_be_one(traced):
    one, other = torch.randn(2), torch.randn(2)

    def made(x, z):
        return lambda score, b, h, q, kv: score + x[h] * kv - z[h] * q

    run(made(one, other))
    run(made(one, one))
    run(made(other, one))
    run(made(other, other))
    assert len(traced) == 2


def test_gradients_go_to_the_tensors_of_the_call(traced):
    made = []
    for _ in range(2):
        table = torch.randn(2, requires_grad=True)
        vt.flex_attention(*TENSORS, lambda score, b, h, q, kv, table=table: score * table[h]).square().sum().backward()
        made.append(table.grad)
    assert len(traced) == 1 and all(gradient.abs().sum() > 0 for gradient in made)


def by_global(score, b, h, q, kv):
    return score * NUMBER


def by_another(score, b, h, q, kv):
    return inner(score) + kv * 0.1


def inner(score, factor=2.0):
    return score * factor * NUMBER


def by_a_default(score, b, h, q, kv, factor=2.0):
    return score * factor


def by_a_keyword(score, b, h, q, kv, *, factor=2.0):
    return score * factor


def test_globals_and_defaults_are_read_at_each_call(traced, monkeypatch):
    made = [run(function) for function in (by_global, by_another, by_a_default, by_a_keyword)]
    count = len(traced)
    for function in (by_global, by_another, by_a_default, by_a_keyword):
        run(function)
    assert len(traced) == count == 4
    monkeypatch.setitem(globals(), "NUMBER", 0.5)
    monkeypatch.setattr(by_a_default, "__defaults__", (0.5,))
    monkeypatch.setattr(by_a_keyword, "__kwdefaults__", {"factor": 0.5})
    again = [run(function) for function in (by_global, by_another, by_a_default, by_a_keyword)]
    assert len(traced) == 8 and not any(map(torch.equal, made, again))
    # What a function calls may be another function.
    monkeypatch.setitem(globals(), "inner", lambda score: score * 7.0)
    run(by_another)
    assert len(traced) == 9
    # Or its code may be another.
    monkeypatch.setattr(by_global, "__code__", by_a_default.__code__.replace(co_argcount=5, co_varnames=("score", "b", "h", "q", "kv", "factor"), co_nlocals=6, co_consts=(None,)))
    with pytest.raises(Exception, match="factor"):
        vt.flex_attention(*TENSORS, by_global)


def test_a_global_may_hide_a_function_of_pythons(traced, monkeypatch):
    def function(score, b, h, q, kv):
        return score * max(2.0, 3.0)

    first = run(function)
    monkeypatch.setitem(globals(), "max", min)
    assert not torch.equal(first, run(function)) and len(traced) == 2


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, True), (1.0, 1), (math.inf, 5.0), ((1.0, 2.0), (1.0, 3.0)), ([1.0], [2.0]), ({"a": 1.0}, {"a": 2.0}), ({"a": 1.0}, {"b": 1.0})])
def test_what_is_equal_and_not_the_same(traced, values):
    def function(score, b, h, q, kv):
        # Of either sign an infinity of its own.
        number = given
        while isinstance(number, (tuple, list, dict)):
            number = max(number.values()) if isinstance(number, dict) else number[-1]
        return torch.where(kv > 5, -score * number, score)

    q, k, v = TENSORS
    for given in (values[0], values[1]):  # noqa: B007
        vt.flex_attention(q, k, v, function)
    assert len(traced) == 2


def test_a_list_may_be_written_to(traced):
    factors = [1.0, 2.0]

    def function(score, b, h, q, kv):
        return score * factors[0] + factors[1]

    first = run(function)
    run(function)
    factors[0] = 3.0
    assert len(traced) - 1 == 0 and not torch.equal(first, run(function)) and len(traced) == 2


class Scaled:
    number = 2.0

    def method(self, score, b, h, q, kv):
        return score * self.number

    __call__ = method


def by_an_object(score, b, h, q, kv):
    return score * SETTINGS.number


def by_an_import(score, b, h, q, kv):
    from math import pi

    return score * pi


def counting():
    calls = 0

    def function(score, b, h, q, kv):
        nonlocal calls
        calls += 1
        return score * calls

    return function


def writing():
    calls = [0]

    def function(score, b, h, q, kv):
        calls[0] += 1
        return score * calls[0]

    return function


def with_a_global(score, b, h, q, kv):
    global OTHER
    OTHER += 1.0
    return score * OTHER


SCALE, TABLE = torch.tensor(2.0), torch.tensor([2.0, 5.0])
ARRAY = TABLE.numpy()

#: What has to be run to know what it says.
RUN = {
    "a method": Scaled().method,
    "an object that is called": Scaled(),
    "an object": by_an_object,
    "an import": by_an_import,
    "a tensor without dims": lambda score, b, h, q, kv: score * SCALE,
    "item": lambda score, b, h, q, kv: score * TABLE[1].item(),
    "the number of a tensor": lambda score, b, h, q, kv: score * float(TABLE[0]),
    "an element": lambda score, b, h, q, kv: score * TABLE[0],
    "a list of a tensor": lambda score, b, h, q, kv: score * TABLE.tolist()[0],
    "the truth of a tensor": lambda score, b, h, q, kv: score * (2.0 if TABLE.sum() > 0 else 3.0),
    "a tensor of tensors": lambda score, b, h, q, kv: score + (TABLE * 2)[h] * kv,
    "the greatest of a tensor": lambda score, b, h, q, kv: score * TABLE.max(),
    "a new tensor": lambda score, b, h, q, kv: score * torch.tensor(2.0),
    "what PyTorch is set to": lambda score, b, h, q, kv: score * (2.0 if torch.is_grad_enabled() else 3.0),
    "an array": lambda score, b, h, q, kv: score * float(ARRAY[0]),
    "print": lambda score, b, h, q, kv: (print(end=""), score * 2.0)[1],
}


@pytest.mark.parametrize("name", RUN)
def test_what_has_to_be_run_is_traced_at_each_call(traced, name):
    run(RUN[name])
    run(RUN[name])
    assert len(traced) == 2 and not _flex_guards._kept


def test_what_changes_behind_objects_and_tensors_is_seen(traced, monkeypatch):
    before = {name: run(RUN[name]) for name in ("a method", "an object", "a tensor without dims", "item", "the number of a tensor", "a tensor of tensors", "the truth of a tensor", "an array")}
    monkeypatch.setattr(Scaled, "number", 5.0)
    monkeypatch.setattr(SETTINGS, "number", 5.0)
    kept = TABLE.clone()
    SCALE.data.fill_(-1.0)
    TABLE.data.copy_(torch.tensor([-3.0, -1.0]))
    try:
        for name, first in before.items():
            assert not torch.equal(first, run(RUN[name])), name
    finally:
        SCALE.fill_(2.0)
        TABLE.copy_(kept)


@pytest.mark.parametrize("make", [counting, writing, lambda: with_a_global])
def test_functions_that_count_their_calls(make):
    q, k, v = TENSORS
    function = make()
    made = [vt.flex_attention(q, k, v, function) for _ in range(3)]
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])


def test_functions_that_name_themselves_and_each_other(traced):
    def power(score, exponent):
        return score if exponent == 1 else score * power(score, exponent - 1)

    def even(score, left):
        return score if left == 0 else odd(score * 0.5, left - 1)

    def odd(score, left):
        return even(score + 1.0, left - 1)

    for _ in range(2):
        run(lambda score, b, h, q, kv: power(score, 2))
        run(lambda score, b, h, q, kv: even(score, 4))
    assert len(traced) == 2


def test_a_variable_that_has_no_value_yet():
    def function(score, b, h, q, kv):
        return score * later

    with pytest.raises(NameError, match="later"):
        vt.flex_attention(*TENSORS, function)
    later = 2.0
    run(function)


def test_the_default_type_is_asked_at_each_call(traced):
    def function(score, b, h, q, kv):
        return score + kv / 3

    q, k, v = TENSORS
    first = vt.flex_attention(q, k, v, function)
    torch.set_default_dtype(torch.float16)
    try:
        second = vt.flex_attention(q, k, v, function)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(traced) == 2 and not torch.equal(first, second)


def test_no_tensor_is_kept():
    table = torch.randn(2)
    run(lambda score, b, h, q, kv, table=table: score + table[h])
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None


def test_refusals_are_not_kept(traced):
    for _ in range(2):
        with pytest.raises(vd.UnsupportedError, match="test_flex_guards.py"):
            vt.flex_attention(*TENSORS, lambda score, b, h, q, kv: score if score > 0 else -score)
    # Nor is what is refused behind the trace told of another function.
    for _ in range(2):
        with pytest.raises(vd.UnsupportedError, match="test_refusals_are_not_kept"):
            torch.func.vmap(lambda q: vt.flex_attention(q, *TENSORS[1:], lambda score, b, h, q, kv: score * score))(TENSORS[0][None])


def test_masks_and_scores_are_one_key(traced):
    flex = torch.nn.attention.flex_attention
    masks = [flex.create_block_mask(lambda b, h, q, kv, width=width: (q - kv).abs() <= width, None, None, 12, 12, device="cpu") for width in (2, 5, 2)]
    made = [vt.flex_attention(*TENSORS, score_mod, mask) for mask in masks for score_mod in (None, by_a_default)]
    assert len(traced) == 6 and torch.equal(made[0], made[4]) and torch.equal(made[1], made[5]) and not torch.equal(made[0], made[2])


def test_many_traces_are_not_all_kept(monkeypatch):
    vt.clear_plans()
    monkeypatch.setattr(_flex_guards, "_MOST_KEPT", 4)
    for number in range(10):
        run(lambda score, b, h, q, kv, number=number: score + number * kv)
    assert len(_flex_guards._kept) == 4
    vt.clear_plans()
    assert not _flex_guards._kept


def test_threads_have_traces_of_their_own():
    failed = []

    def work(number):
        table = torch.full((2,), float(number))
        try:
            for _ in range(20):
                run(lambda score, b, h, q, kv: score + table[h] * kv)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# What is decided about a call of a function, once for calls of one kind.


@pytest.fixture
def decided(monkeypatch):
    """Counts decisions."""
    vt.clear_plans()
    count = []
    for name in ("_options", "_of_function"):
        own = getattr(_flex, name)
        monkeypatch.setattr(_flex, name, lambda *args, own=own, name=name: count.append(name) or own(*args))
    return count


def dense(q, k, v, function, mask=None):
    """As `run` expects it, of any tensors, with heads of queries that share keys."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    places = [torch.arange(size).reshape([size if axis == own else 1 for axis in range(4)]) for own, size in enumerate(sizes)]
    scores = function(q @ k.mT * q.shape[-1] ** -0.5, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(*places), -math.inf)
    return scores.softmax(-1) @ v


def capped(score, b, h, q, kv):
    return 5 * torch.tanh(score / 5)


def bent(score, b, h, q, kv):
    return torch.where(score > 0, score * 1.5, score * 0.5) + (q - kv) * 0.01


@pytest.mark.parametrize("function", [capped, bent])
def test_calls_of_one_kind_are_decided_once(decided, function):
    for _ in range(3):
        q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
        close(vt.flex_attention(q, k, v, function), dense(q, k, v, function), 4.0)
    assert len(decided) == 1


@pytest.mark.parametrize("function", [capped, bent])
def test_calls_of_other_kinds_are_decided_anew(decided, function):
    """Each is what the one before it was not, and is called between two calls of that one."""
    base = {"sizes": (1, 2, 2, 12, 12, 8, 8), "dtype": torch.float32, "options": {}, "trained": False}
    others = [
        {"sizes": (1, 2, 2, 12, 20, 8, 8)},
        {"sizes": (1, 2, 2, 20, 12, 8, 8)},
        {"sizes": (2, 2, 2, 12, 12, 8, 8)},
        {"sizes": (1, 4, 2, 12, 12, 8, 8), "options": {"enable_gqa": True}},
        {"sizes": (1, 2, 2, 12, 12, 16, 8)},
        {"sizes": (1, 2, 2, 12, 12, 8, 16)},
        {"dtype": torch.float64},
        {"options": {"scale": 0.5}},
        {"options": {"return_lse": True}},
        {"trained": True},
    ]
    for count, changed in enumerate([{}, *others, {}]):
        told = {**base, **changed}
        b, h, kv_h, queries, keys, d, dv = told["sizes"]
        q, k, v = (torch.randn(dims, dtype=told["dtype"]) for dims in ((b, h, queries, d), (b, kv_h, keys, d), (b, kv_h, keys, dv)))
        for x in (q, k, v):
            x.requires_grad_(told["trained"])
        scale = told["options"].get("scale", d**-0.5)
        found = vt.flex_attention(q, k, v, function, **told["options"])
        o = found[0] if told["options"].get("return_lse") else found
        expected = dense(q.detach() * (scale * d**0.5), k.detach(), v.detach(), function)
        close(o, expected, 4.0)
        assert o.requires_grad == told["trained"]
        assert len(decided) == min(count, len(others)) + 1, changed


def test_gradients_of_calls_that_were_decided_before(decided):
    """The second call has other tensors, a table among them; each has its own gradients."""
    table = torch.randn(12)

    def function(score, b, h, q, kv):
        return score * table[kv]

    for _ in range(2):
        table = torch.randn(12, requires_grad=True)
        tensors = [torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3)]
        d_o = torch.randn(1, 2, 12, 8)
        found = torch.autograd.grad(vt.flex_attention(*tensors, function), (*tensors, table), d_o)
        expected = torch.autograd.grad(dense(*tensors, function), (*tensors, table), d_o.double())
        for one, other in zip(found, expected):
            close(one, other, 8.0)
    assert len(decided) == 1


def test_masks_whose_blocks_say_more_are_decided_at_each_call(decided):
    """The function says that every pair is attended, the lists say which: nothing about them follows from the function."""
    whole = create_block_mask(lambda b, h, q, kv: q >= 0, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    tensors = [torch.randn(1, 2, 32, 8) for _ in range(3)]
    close(vt.flex_attention(*tensors, capped, whole), dense(*tensors, capped), 4.0)
    first = torch.tensor([[[1, 1]]], dtype=torch.int32)
    of_one = BlockMask.from_kv_blocks(first, torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32), BLOCK_SIZE=16, mask_mod=whole.mask_mod, seq_lengths=(32, 32))
    for _ in range(2):
        close(vt.flex_attention(*tensors, capped, of_one), dense(*tensors, capped, lambda b, h, q, kv: q // 16 == kv // 16), 4.0)
    close(vt.flex_attention(*tensors, capped, whole), dense(*tensors, capped), 4.0)
    assert len(decided) == 3


@pytest.mark.parametrize("function", [capped, bent, lambda score, b, h, q, kv: score * OF_KEYS[kv]])
def test_no_tensor_of_a_decision_is_kept(function):
    vt.clear_plans()
    tensors = [torch.randn(1, 2, 12, 8) for _ in range(3)]
    for is_trained in (False, True):
        given = [x.clone().requires_grad_(is_trained) for x in tensors]
        table = globals()["OF_KEYS"] = torch.rand(12)
        known = [weakref.ref(x) for x in (*given, table)]
        vt.flex_attention(*given, function)
        globals()["OF_KEYS"] = None
        del given, table
        gc.collect()
        assert [ref() for ref in known] == [None] * 4


OF_KEYS = None


def test_many_decisions_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(_flex, "_MOST_DECIDED", 3)
    vt.clear_plans()
    for keys in (*range(4, 12), 4):
        q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
        close(vt.flex_attention(q, k, v, bent), dense(q, k, v, bent), 4.0)
    (kept,) = _flex_guards._kept.values()
    assert len(kept[0].decided) <= 3


# What a call leaves behind for others.


def waved(score, b, h, q, kv):
    return score + torch.sin(q * 1.3 + kv)


def test_a_transform_leaves_nothing_behind():
    """Biases and masks that follow from sizes are kept; those of a transform are its own."""
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    steps = create_block_mask(lambda b, h, q, kv: (q // 4 + kv) % 3 > 0, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    for score_mod, mask in ((waved, None), (None, steps)):
        vt.clear_plans()
        (found,) = torch.func.grad(lambda x: vt.flex_attention(x, k, v, score_mod, mask).square().sum(), argnums=(0,))(q)
        leaf = q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(vt.flex_attention(leaf, k, v, score_mod, mask).square().sum(), leaf)
        torch.testing.assert_close(found, expected)


def test_a_mode_leaves_nothing_behind():
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    expected = dense(q, k, v, waved)
    vt.clear_plans()
    for _ in range(2):
        with FakeTensorMode():
            fake = torch.randn(1, 2, 32, 8, requires_grad=True)
            vt.flex_attention(fake, fake, fake, waved).sum().backward()
            assert fake.grad.shape == fake.shape
    q.requires_grad_()
    close(vt.flex_attention(q, k, v, waved), expected, 4.0)


@pytest.mark.parametrize("is_inference", [False, True])
def test_blocks_that_are_written_to_in_place(is_inference):
    def causal(b, h, q, kv):
        return q >= kv

    with torch.inference_mode(is_inference):
        q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
        mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        close(vt.flex_attention(q, k, v, block_mask=mask), dense(q, k, v, lambda score, *_: score, causal), 4.0)
        # Blocks of the diagonal are what is left.
        mask.full_kv_num_blocks.zero_()
        expected = dense(q, k, v, lambda score, *_: score, lambda b, h, q, kv: (q >= kv) & (q // 16 == kv // 16))
        close(vt.flex_attention(q, k, v, block_mask=mask), expected, 4.0)


def test_numbers_are_on_no_default_device():
    def function(score, b, h, q, kv):
        return torch.sigmoid(score) + (2**h) * 0.1 + torch.maximum(q - kv, torch.tensor(3, device="cpu"))

    with torch.device("meta"):
        made = vt.flex_attention(*TENSORS, function)
    close(made, dense(*TENSORS, function), 4.0)


def test_a_list_that_holds_itself():
    numbers = [2.0]
    numbers.append(numbers)
    run(lambda score, b, h, q, kv: score * numbers[0])
