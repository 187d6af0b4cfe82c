"""The bench's own door to the package, on the CPU device: every kind of row goes through, is right, and is explained."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")

from verdigris.bench import measure, models, ours, problems, tensors
from verdigris.bench.row import Bench, Options

CPU = torch.device("cpu")

LIST = """
[[group]]
class = "last"
directions = ["fprop", "dgrad", "wgrad"]
dtypes = ["bf16", "f32"]
problems = [
    { name = "strided", n = 2, c = 8, k = 16, input = [9, 8], filter = [3, 3], pad = 1, stride = 2 },
    { name = "depthwise", n = 2, c = 8, k = 16, input = [9, 8], filter = [3, 3], pad = 2, dilation = 2, groups = 8 },
    { name = "line", n = 2, c = 3, k = 4, input = [19], filter = [4] },
]
[[group]]
class = "first"
layout = "channels-first"
directions = ["fprop", "dgrad", "wgrad"]
dtypes = ["bf16"]
problems = [{ name = "volume", n = 1, c = 6, k = 4, input = [5, 6, 7], filter = [3, 2, 1], pad = [1, 0, 0], stride = [1, 2, 1], groups = 2 }]
[[group]]
class = "narrow"
directions = ["fprop"]
dtypes = ["int8"]
problems = [{ name = "bytes", n = 1, c = 16, k = 8, input = [6, 6], filter = [3, 3] }]
[[group]]
class = "products"
layouts = ["nn", "nt", "tn", "tt"]
dtypes = ["bf16", "f32", "int8"]
problems = [{ m = 33, n = 40, k = 24 }, { batch = 3, m = 7, n = 9, k = 11 }]
[[group]]
class = "products"
layouts = ["nt"]
dtypes = ["bf16"]
problems = [{ m = 33, n = 40, k = 24, lda = 27, ldb = 29, ldd = 43 }]
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "list.toml"
    path.write_text(LIST)
    return problems.load([path])


@pytest.mark.parametrize("name", ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])])
def test_every_row_is_right_through_the_package(rows, name, monkeypatch):
    monkeypatch.setattr(tensors, "CPU_CACHE_BYTES", 1 << 10)
    device = torch.device(name)
    timer = measure.CudaTimer(50.0) if device.type == "cuda" else measure.HostTimer()
    bench = Bench(device, ours.open_door(device), timer, Options(seconds=1e-4), {})
    doors = set()
    for problem in rows:
        row = bench.row(problem)
        assert "fault" not in row and "refused" not in row, row
        assert row["us"] > 0 and row["engine"].startswith("cpu.") == (name == "cpu"), row
        assert not [text for text in row["remarks"] if "explained" in text or "captured" in text], row
        doors.add((problem.suite, row["door"]))
    assert doors == {("conv", "torch"), ("conv", "plan"), ("gemm", "torch"), ("gemm", "plan")}


def test_networks_are_converted_and_functions_found():
    door = ours.open_door(CPU)
    network = door.convert(models.ResNet50(10, (1, 1, 1, 1), 8))
    kinds = {type(module).__module__ for module in network.modules() if "Conv" in type(module).__name__}
    assert kinds == {"verdigris.torch.nn"}
    x, w = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3)
    torch.testing.assert_close(door.conv2d()(x, w), torch.nn.functional.conv2d(x, w, None, 1, 1))
    assert door.package().name == "verdigris" and door.versions()["verdigris"]


def test_a_record_says_what_the_native_half_was_built_from():
    from verdigris import _native

    told = ours.open_door(CPU).source()
    assert told["native"] == _native.BUILD_HASH and len(_native.BUILD_HASH) == 64 and told["hash"] not in ("", told["native"], told["python"])
