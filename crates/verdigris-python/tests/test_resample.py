"""Resampling and padding of PyTorch's tensors against PyTorch's own on the CPU."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import verdigris  # noqa: E402
import verdigris.torch as vt  # noqa: E402

F = torch.nn.functional


def _x(shape, dtype=torch.float32, last=False, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[len(shape)]) if last and len(shape) in formats else x


def _both(ours, theirs, x, tolerance=2e-6):
    """The two functions, and the gradients of both."""
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(a), theirs(b)
    assert y.shape == z.shape and y.dtype == z.dtype
    assert y.is_contiguous(memory_format=torch.channels_last) == z.is_contiguous(memory_format=torch.channels_last) or y.dim() != 4
    torch.testing.assert_close(y, z, rtol=tolerance, atol=tolerance)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(y.dtype)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=8 * tolerance, atol=8 * tolerance)
    # One node, with the tensor behind it.
    assert y.grad_fn.next_functions[0][0].name().endswith("AccumulateGrad")


_SHAPES = {1: (2, 3, 9), 2: (2, 3, 7, 10), 3: (1, 2, 4, 5, 6)}
_MODES = [
    *[(spatial, mode, None) for spatial in (1, 2, 3) for mode in ("nearest", "nearest-exact")],
    *[(1, "linear", corners) for corners in (False, True)],
    *[(2, mode, corners) for mode in ("bilinear", "bicubic") for corners in (False, True)],
    *[(3, "trilinear", corners) for corners in (False, True)],
]


@pytest.mark.parametrize("spatial,mode,corners", _MODES)
@pytest.mark.parametrize("how", ["double", "uneven", "down", "one", "same", "factor", "third", "recomputed"])
def test_interpolate(spatial, mode, corners, how):
    shape = _SHAPES[spatial]
    options = {
        "double": {"size": tuple(2 * extent for extent in shape[2:])},
        "uneven": {"size": tuple(extent + 3 + i for i, extent in enumerate(shape[2:]))},
        "down": {"size": tuple(extent // 2 for extent in shape[2:])},
        "one": {"size": 1},
        "same": {"size": shape[2:]},
        "factor": {"scale_factor": 1.55},
        "third": {"scale_factor": tuple((1 / 3, 2.3, 0.8)[:spatial])},
        "recomputed": {"scale_factor": 1.55, "recompute_scale_factor": True},
    }[how]
    options |= {"mode": mode, "align_corners": corners}
    # Sums of weights of bicubic modes lose some bits.
    _both(lambda x: vt.interpolate(x, **options), lambda x: F.interpolate(x, **options), _x(shape), 1e-5)


def test_from_one_element():
    for mode in ("nearest", "bilinear", "bicubic"):
        _both(lambda x: vt.interpolate(x, (3, 5), mode=mode), lambda x: F.interpolate(x, (3, 5), mode=mode), _x((2, 3, 1, 1)), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("last", [False, True])
def test_types_and_formats(dtype, last):
    x = _x((2, 8, 6, 7), dtype, last)
    # PyTorch's kernels for CPUs round coordinates to 16 bits: of such types the results in f32 are what is right.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for mode in ("nearest", "bilinear", "bicubic"):
        y = vt.interpolate(x, (12, 14), mode=mode)
        want = F.interpolate(x.to(wide), (12, 14), mode=mode).to(dtype)
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last) == last
        torch.testing.assert_close(y, want, rtol=1e-2 if dtype != torch.float64 else 1e-14, atol=1e-2 if dtype != torch.float64 else 1e-14)
    for mode in ("reflect", "replicate", "circular", "constant"):
        y = vt.pad(x, (1, 2, 3, 0), mode)
        assert torch.equal(y, F.pad(x, (1, 2, 3, 0), mode))
        assert y.is_contiguous(memory_format=torch.channels_last) == last


def test_strides_and_empty_batches():
    x = _x((4, 9, 8, 10))[::2, 1::2, :, ::3]
    _both(lambda x: vt.interpolate(x, 7, mode="bilinear"), lambda x: F.interpolate(x, 7, mode="bilinear"), x, 1e-5)
    empty = vt.interpolate(torch.empty(0, 3, 4, 4), 7)
    assert empty.shape == (0, 3, 7, 7)
    assert vt.pad(torch.empty(0, 3, 4), (1, 1), "reflect").shape == (0, 3, 6)


def test_an_element_of_weight_0_does_not_reach_the_result():
    x = torch.tensor([[[1.0, 2.0, math.inf]]])
    assert vt.interpolate(x, 5, mode="linear", align_corners=True).tolist() == [[[1.0, 1.5, 2.0, math.inf, math.inf]]]
    # PyTorch multiplies it by 0.
    assert math.isnan(F.interpolate(x, 5, mode="linear", align_corners=True)[0, 0, 2])


def test_area_is_adaptive_average_pooling():
    _both(lambda x: vt.interpolate(x, (3, 4), mode="area"), lambda x: F.interpolate(x, (3, 4), mode="area"), _x((2, 3, 7, 10)))
    _both(
        lambda x: vt.interpolate(x, scale_factor=0.4, mode="area"),
        lambda x: F.interpolate(x, scale_factor=0.4, mode="area"),
        _x((2, 3, 7, 10)),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 3, "scale_factor": 2.0},
        {"size": (3, 3, 3)},
        {"size": 0},
        {"size": 2.5},
        {"scale_factor": (2.0,)},
        {"scale_factor": 0.01},
        {"size": 3, "align_corners": True},
        {"size": 3, "recompute_scale_factor": True},
        {"size": 3, "mode": "linear"},
        {"size": 3, "mode": "trilinear"},
        {"size": 3, "mode": "nothing"},
    ],
)
def test_what_pytorch_refuses_is_refused(options):
    x = _x((2, 3, 7, 10))
    for function in (F.interpolate, vt.interpolate):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError, TypeError)):
            function(x, **options)


def test_antialias_is_refused():
    with pytest.raises(verdigris.UnsupportedError, match="antialias"):
        vt.interpolate(_x((2, 3, 7, 10)), 3, mode="bilinear", antialias=True)


_PADS = [
    ((2, 3, 9), (2, 3)),
    ((3, 9), (4, 0)),
    ((2, 3, 5, 6), (1, 2, 4, 3)),
    ((3, 5, 6), (1, 2, 0, 3)),
    ((2, 3, 5, 6), (-1, 2, 3, -2)),
    ((2, 2, 3, 4, 5), (2, 1, 0, 3, 2, 2)),
]


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("shape,sizes", _PADS)
def test_pad(mode, shape, sizes):
    x = _x(shape)
    assert torch.equal(vt.pad(x, sizes, mode), F.pad(x, sizes, mode))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = vt.pad(a, sizes, mode), F.pad(b, sizes, mode)
    dy = torch.randn_like(z)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-5)


def test_constant_padding_of_any_dims():
    for shape, sizes, value in [((4,), (1, 2), 3.0), ((2, 3), (1, 0, 2, 1), -1.5), ((2, 3, 4, 5), (0, 0, 1, 1, 2, 0, 1, 0), None), ((5,), (-2, 1), 1.0)]:
        x = _x(shape)
        assert torch.equal(vt.pad(x, sizes, value=value), F.pad(x, sizes, value=value))
    integers = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    assert torch.equal(vt.pad(integers, (1, 1), value=7), F.pad(integers, (1, 1), value=7))
    with pytest.raises(verdigris.UnsupportedError, match="finite"):
        vt.pad(_x((2, 3)), (1, 1), value=float("inf"))


@pytest.mark.parametrize(
    "shape,sizes,mode,value",
    [
        ((1, 1, 4), (4, 0), "reflect", None),
        ((1, 1, 4), (5, 0), "circular", None),
        ((1, 1, 4), (1,), "reflect", None),
        ((1, 1, 4), (1, 2, 1, 1), "reflect", None),
        ((1, 1, 4), (1, 1), "reflect", 1.0),
        ((1, 1, 4), (-3, -2), "constant", None),
        ((1, 1, 4), (-5, 3), "constant", None),
        ((1, 1, 4), (-3, -2, 4, 4), "constant", None),
        ((1, 1, 4), (1, 1, 1, 1, 1, 1, 1, 1), "constant", None),
        ((1, 1, 4), (1, 1), "nothing", None),
        ((1, 0, 4), (1, 1), "reflect", None),
    ],
)
def test_pads_that_pytorch_refuses_are_refused(shape, sizes, mode, value):
    for function in (F.pad, vt.pad):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
            function(torch.zeros(shape), sizes, mode, value)


def test_gradcheck_twice():
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x: vt.interpolate(x, (7, 3), mode="bicubic"),
        lambda x: vt.interpolate(x, (3, 9), mode="bilinear", align_corners=True),
        lambda x: vt.pad(x, (2, 1, 3, 0), "reflect"),
        lambda x: vt.pad(x, (2, -1, 0, 1)),
    ):
        torch.autograd.gradcheck(function, x)
        torch.autograd.gradgradcheck(function, x)


def test_modules_and_convert():
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReflectionPad2d((1, 2, 0, 1)),
        nn.Upsample(scale_factor=1.6, mode="bilinear"),
        nn.ReplicationPad2d(1),
        nn.CircularPad2d(2),
        nn.ConstantPad2d((1, 0, 2, 1), 0.5),
        nn.ZeroPad2d(1),
        nn.UpsamplingNearest2d(scale_factor=2),
        nn.UpsamplingBilinear2d(size=(9, 8)),
    )
    ours, report = vt.convert(model)
    assert not report.kept and len(report.swapped) == 9, report
    x = _x((2, 3, 6, 7))
    torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-5)
    for name in ("ReflectionPad1d", "ReflectionPad3d", "ReplicationPad1d", "ReplicationPad3d", "CircularPad1d", "CircularPad3d", "ZeroPad1d", "ZeroPad3d"):
        spatial = int(name[-2])
        module = getattr(nn, name)(1)
        swapped, _ = vt.convert(module)
        x = _x((2, 3, *(4, 5, 6)[:spatial]))
        assert type(swapped) is not type(module) and torch.equal(swapped(x), module(x)), name
        assert torch.equal(swapped(x[0]), module(x[0])), name


def test_compiled():
    x = _x((2, 3, 6, 7))
    function = torch.compile(lambda x: vt.pad(vt.interpolate(x, scale_factor=2.0, mode="bilinear"), (1, 1, 0, 0), "reflect"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(function(x), F.pad(F.interpolate(x, scale_factor=2.0, mode="bilinear"), (1, 1, 0, 0), "reflect"), rtol=1e-5, atol=1e-5)


def test_graph_methods():
    g = verdigris.Graph("resample")
    x = g.tensor("x", "f32", [1, 2, 3, 4])
    y = g.resample("linear", x, [6, 8])
    z = g.pad_border("reflect", y, [1, 0], [2, 3])
    back = g.pad_border_backward("reflect", z, [1, 2, 6, 8], [1, 0], [2, 3])
    dx = g.resample_backward("linear", back, [1, 2, 3, 4], align_corners=False)
    g.store(dx, "dx", "f32")
    with pytest.raises(verdigris.GraphError, match="filter"):
        g.resample("nothing", x, [6, 8])
    with pytest.raises(verdigris.GraphError, match="border"):
        g.pad_border("nothing", x, [1, 1], [1, 1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_constants_are_numbers_of_the_type(dtype):
    """In integers a constant loses its fraction, and one beyond the type's range is refused, as by PyTorch."""
    x = torch.ones(3, dtype=dtype)
    values = [1.5, -1.5, -0.5, 255.0, 255.7, 256, 127.5, -129, 2**31, 2**53 + 1, 65504.0, 65505.0, 3.3953e38, -3.5e38, 1e30, -(2**63)]
    taken = 0
    for value in values:
        try:
            want = F.pad(x, (1, 2), value=value)
        except RuntimeError:
            with pytest.raises(verdigris.GraphError, match="it holds numbers from"):
                vt.pad(x, (1, 2), value=value)
        else:
            taken += 1
            assert torch.equal(vt.pad(x, (1, 2), value=value), want), value
    assert 0 < taken and (taken < len(values)) == (dtype != torch.float64)
    # Where nothing is padded nobody looks.
    assert torch.equal(vt.pad(x, (0, 0), value=1e300), x)


def test_truth_values_move_as_bytes():
    x = torch.rand(2, 8, 4, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    for given in (x, x.transpose(2, 3), x.contiguous(memory_format=torch.channels_last), x[:, ::2]):
        for value in (None, 0, 1, 0.5, -2, True):
            assert torch.equal(vt.pad(given, (1, -2, 0, 3, 1, 0), value=value), F.pad(given, (1, -2, 0, 3, 1, 0), value=value))
        assert torch.equal(vt.pad(given, (1, 2, 2, 0), mode="circular"), F.pad(given, (1, 2, 2, 0), mode="circular"))
        pairs = ((vt.pixel_shuffle, F.pixel_shuffle), (vt.pixel_unshuffle, F.pixel_unshuffle), (vt.channel_shuffle, F.channel_shuffle))
        for ours, theirs in pairs:
            mine = ours(given, 2)
            assert mine.dtype == torch.bool and torch.equal(mine, theirs(given, 2))
    for module in (torch.nn.ZeroPad2d(1), torch.nn.ConstantPad2d(2, 1.0), torch.nn.PixelShuffle(2)):
        assert torch.equal(vt.convert(module)[0](x), module(x))
    with pytest.raises(verdigris.UnsupportedError, match="complex64"):
        vt.pad(torch.ones(2, dtype=torch.complex64), (1, 1))


def test_sizes_are_numbers_of_others_too():
    numpy = pytest.importorskip("numpy")
    x = torch.randn(1, 2, 3, 4)
    for size in (numpy.int64(5), (numpy.int32(5), torch.tensor(4)), torch.tensor(6), [torch.tensor([5]), 3], torch.Size((2, 7))):
        for mode in ("nearest", "bilinear", "area"):
            torch.testing.assert_close(vt.interpolate(x, size, mode=mode), F.interpolate(x, size, mode=mode))
    torch.testing.assert_close(vt.interpolate(x, scale_factor=numpy.float64(1.5)), F.interpolate(x, scale_factor=1.5))
    with pytest.raises(TypeError, match="size is"):
        vt.interpolate(x, numpy.float64(5.0))


def test_borders_of_what_is_left_out_whole_are_named():
    """PyTorch has results of these, some without elements."""
    for shape, sizes, mode in (((3, 2), (1, -2), "circular"), ((2, 1, 3, 1), (-1, 0, 1, 4), "replicate"), ((2, 3, 2, 2), (-1, 0, -2, 0), "reflect")):
        F.pad(torch.zeros(shape), sizes, mode)
        with pytest.raises(verdigris.UnsupportedError, match="an element is left"):
            vt.pad(torch.zeros(shape), sizes, mode)


@pytest.mark.parametrize("mode, shape", [("linear", (1, 2, 5)), ("bilinear", (1, 2, 5, 4)), ("trilinear", (1, 2, 5, 4, 3))])
def test_factors_that_change_no_size_copy(mode, shape):
    x = _x(shape)
    y = vt.interpolate(x, scale_factor=1.1, mode=mode)
    assert y.shape == x.shape and torch.equal(y, x)
    assert torch.equal(y, torch.nn.functional.interpolate(x, scale_factor=1.1, mode=mode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 2, 5), (2, 3, 5, 4), (1, 2, 7, 16), (1, 2, 5, 4, 3)])
def test_nearest_by_factors_that_change_few_sizes(shape, dtype):
    x = (torch.rand(shape) * 255).to(dtype).requires_grad_(dtype.is_floating_point)
    for first, other in itertools.product((1.0, 1.01, 1.1, 1.19, 1.7, 0.6), repeat=2):
        factors = (first, *[other] * (len(shape) - 3))
        y, truth = (f(x, scale_factor=factors, mode="nearest") for f in (vt.interpolate, torch.nn.functional.interpolate))
        assert y.shape == truth.shape and torch.equal(y, truth), factors
        if len(shape) == 4 and y.shape == x.shape:
            assert torch.equal(y, x)
            if dtype.is_floating_point:
                assert (torch.autograd.grad(y.sum(), x)[0] == 1).all()
