"""The bench's whole programs on the CPU: networks, training, errors, and what a call costs."""

import pytest

torch = pytest.importorskip("torch")

from verdigris.bench import cli, latency, models, ours, record, telemetry, train

torch.set_num_threads(1)


def test_networks_are_those_of_the_papers():
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in make(True).parameters()) for name, make in models.MODELS.items()}
    assert counts == {"resnet50": 25_557_032, "convnext_tiny": 28_589_128}


@pytest.mark.parametrize("name", list(models.MODELS))
def test_networks_are_torchvisions(name):
    torchvision = pytest.importorskip("torchvision")
    ours, theirs = models.MODELS[name](True), getattr(torchvision.models, name)()
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [(k, v.shape) for k, v in theirs.state_dict().items()]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


class Noisy(torch.nn.Conv2d):
    """A convolution whose result is off by a part in a thousand times ``noise``."""

    noise = 0.0

    def forward(self, x):
        y = super().forward(x)
        return y + y.detach() * self.noise * torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) if self.noise else y


class Door:
    def __init__(self, noise=0.0):
        self.noise = noise

    def versions(self):
        return {"verdigris": "test"}

    def convert(self, network):
        for module in network.modules():
            if type(module) is torch.nn.Conv2d:
                module.__class__ = Noisy
                module.noise = self.noise
        return network


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(
        train,
        "MODELS",
        {
            "resnet50": lambda deterministic: models.ResNet50(1000, (1, 1, 1, 1), 8),
            "convnext_tiny": lambda deterministic: models.ConvNeXtTiny(1000, (8, 16, 24, 32), (1, 1, 1, 1), 0.0),
        },
    )


def trained(door, path, monkeypatch, *words):
    monkeypatch.setattr(ours, "open_door", lambda device: door)
    fixed = ["train", "--device", "cpu", "--batch", "4", "--accuracy-batch", "4", "--extent", "32", "--seeds", "2", "--seconds", "0.05"]
    status = cli.main([*fixed, "--json", str(path), *words])
    return status, record.read(path)[-1].rows


def test_the_same_network_has_the_same_errors(small, tmp_path, monkeypatch):
    status, rows = trained(Door(), tmp_path / "a.jsonl", monkeypatch)
    assert status == 0 and set(rows) == {"train/resnet50", "train/convnext_tiny"}
    for facts in rows.values():
        assert facts["error_worst"] == pytest.approx(1.0) and facts["tensors_over_bar"] == 0
        assert facts["logits_error"] > 0 and facts["speed_eager"] > 0 and facts["images_per_s_ours_eager"] > 0


def test_noise_is_seen_in_the_errors(small, tmp_path, monkeypatch):
    _, rows = trained(Door(0.05), tmp_path / "a.jsonl", monkeypatch, "--no-speed", "--model", "resnet50")
    facts = rows["train/resnet50"]
    assert facts["error_worst"] > 1.25 and facts["tensors_over_bar"] > 10 and facts["worst_tensors"][0]["ratio"] == facts["error_worst"]


def test_a_call_has_a_cost_on_both_sides(monkeypatch):
    monkeypatch.setattr(latency, "NEW_SHAPES", latency.NEW_SHAPES[:2])
    slow = lambda x, w: [torch.nn.functional.conv2d(x, w, None, 1, 1) for _ in range(4)][0]
    fast = lambda x, w: torch.nn.functional.conv2d(x, w, None, 1, 1)
    for gradients in (False, True):
        one, other = latency._host_us([slow, fast], torch.device("cpu"), 27, gradients)
        assert one.over(other).median > 1.5
    assert latency._new_shape_ms(fast, torch.device("cpu")) < 1e3


def test_files_of_the_package_are_counted(tmp_path):
    package = tmp_path / "verdigris"
    (package / "torch").mkdir(parents=True)
    (tmp_path / "verdigris.libs").mkdir()
    (package / "torch" / "a.so").write_bytes(bytes(1_500_000))
    (package / "a.pyc").write_bytes(bytes(9_000_000))
    (tmp_path / "verdigris.libs" / "b.so").write_bytes(bytes(500_000))
    assert latency._installed_mb(package) == pytest.approx(2.0)


class FakeTelemetry:
    """Counts what it is told, and answers no scrape before a second has gone by."""

    address = "127.0.0.1:9"

    def __init__(self):
        self.on, self.turns, self.ended = True, [], False

    def pause(self):
        self.on = False
        self.turns.append("paused")

    def resume(self):
        self.on = True
        self.turns.append("on")

    def close(self):
        self.ended = True


def test_each_side_of_a_pair_comes_first_in_turn():
    exporter = FakeTelemetry()
    listening = lambda is_on: (exporter.resume if is_on else exporter.pause)()
    found = telemetry.pairs(lambda: 2.0 if exporter.on else 1.0, listening, 4, False)
    assert found == [(2.0, 1.0)] * 4
    assert exporter.turns == ["on", "paused", "paused", "on"] * 2
    assert telemetry.pairs(lambda: 2.0 if exporter.on else 1.0, listening, 3, True) == [(1.0, 1.0)] * 3
    mean, error = telemetry.mean_and_error([1.0, 1.2])
    assert mean == pytest.approx(1.1) and error == pytest.approx(0.1)
    assert telemetry.mean_and_error([1.0])[1] == float("inf")


def test_what_metrics_cost_is_told_with_its_error(small, tmp_path, monkeypatch):
    exporter = FakeTelemetry()

    class Heard(Door):
        def listen(self, **options):
            assert options == {"prometheus": 0, "nvml": telemetry.EACH_S}
            return exporter

        def conv2d(self):
            return lambda x, w: torch.nn.functional.conv2d(x, w, None, 1, 1)

    monkeypatch.setattr(ours, "open_door", lambda device: Heard())
    words = ["telemetry", "--device", "cpu", "--batch", "2", "--extent", "32", "--pairs", "4", "--steps", "1", "--calls", "800"]
    status = cli.main([*words, "--json", str(tmp_path / "a.jsonl")])
    facts = record.read(tmp_path / "a.jsonl")[-1].rows["telemetry/resnet50"]
    assert status == 0 and exporter.ended
    assert (facts["listened"]["pairs"], facts["paused"]["pairs"]) == (4, 2)
    low, high = facts["listened_interval"]
    assert low < facts["listened"]["ratio"] < high and facts["host_us"] > 0
    assert cli.main(["telemetry", "--device", "cpu", "--pairs", "0"]) == 2
