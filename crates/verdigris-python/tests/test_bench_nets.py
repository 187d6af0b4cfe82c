"""The suite of networks on the CPU: a small stand-in for each kind of answer, and one of torchvision's where it is installed."""

import math
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")

from verdigris.bench import cli, nets, ours, record, render
from verdigris.bench.peers import Refused

torch.set_num_threads(1)

CPU = torch.device("cpu")


class Small(torch.nn.Module):
    """Two layers with dropout between, and an auxiliary answer in training, as GoogLeNet has one."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3, 2, 1)
        self.drop = torch.nn.Dropout(0.5)
        self.fc, self.aux = torch.nn.Linear(16, 10), torch.nn.Linear(16, 10)

    def forward(self, x):
        x = self.drop(torch.relu(self.conv(x)).mean((2, 3)))
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


def small(name):
    torch.manual_seed(7)
    return Small()


def test_a_network_is_measured_on_both_sides(monkeypatch):
    door = ours.open_door(CPU)
    for what in nets.WHATS:
        facts = nets.row("resnet50", what, "eager", door, CPU, 4, (3, 12, 12), 0.02, maker=small)
        assert "refused" not in facts and "fault" not in facts, facts
        assert facts["wall_ms_ours"] > 0 and facts["wall_ratio"] > 0 and facts["host_ms_plain"] > 0 and facts["host_ratio"] > 0
        assert 0 < facts["error_plain"] < 0.1 and facts["error_ours"] < 2 * facts["error_plain"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for CPUs needs a C++ compiler")
def test_a_compiled_network_carries_steps_by_our_backend_alone():
    from torch._inductor.utils import fresh_cache

    door = ours.open_door(CPU, mode="instant")
    for backend, steps in (("verdigris", 1), ("inductor", None)):
        with fresh_cache():
            facts = nets.row("resnet50", "inference", "compile", door, CPU, 4, (3, 12, 12), 0.01, maker=small, backend=backend)
        assert "refused" not in facts and facts["wall_ratio"] > 0 and facts.get("fused_steps") == steps, facts


class Wrong:
    def convert(self, network):
        network.fc = torch.nn.Sequential(network.fc, torch.nn.Hardtanh(-0.01, 0.01))
        return network


def test_a_wrong_network_is_a_fault_and_a_broken_one_refused():
    facts = nets.row("resnet50", "inference", "eager", Wrong(), CPU, 4, (3, 12, 12), 0.02, maker=small)
    assert facts["fault"].startswith("error ")
    absent = nets.row("resnet50", "inference", "eager", ours.Absent("no package here"), CPU, 4, (3, 12, 12), 0.02, maker=small)
    assert absent["refused"] == "no package here"

    def nothing(name):
        raise Refused("torchvision cannot be imported")

    assert nets.row("resnet50", "training", "eager", Wrong(), CPU, 4, (3, 12, 12), 0.02, maker=nothing)["refused"].startswith("torchvision")


def test_errors_and_losses():
    a = [torch.ones(4), torch.zeros(2)]
    assert nets.error(a, a) == 0 and nets.error(a, [torch.ones(4) * 1.5, torch.zeros(2)]) == pytest.approx(0.5)
    assert math.isnan(nets.error(a, a[:1]))
    labels = torch.tensor([1, 2])
    flat, pixels = torch.randn(2, 10), torch.randn(2, 10, 3, 3)
    alone = torch.nn.functional.cross_entropy(flat, labels)
    assert nets.loss_of({"a": flat, "b": flat}, labels) == pytest.approx(2 * float(alone))
    assert nets.loss_of({"out": pixels}, labels).dim() == 0 and nets.loss_of({"x": torch.tensor(2.0), "y": torch.tensor(3.0)}, None) == 5.0


@pytest.mark.parametrize(
    "mine, plain, told", [(0.02, 0.01, None), (0.021, 0.01, "fault"), (math.nan, 0.01, "fault"), (math.nan, math.nan, "remark")]
)
def test_an_error_that_is_no_number_does_not_pass(mine, plain, told):
    facts = {"error_ours": mine, "error_plain": plain}
    nets._judge(facts)
    assert [field for field in ("fault", "remark") if field in facts] == ([told] if told else [])


def test_the_suite_as_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nets, "make", small)
    monkeypatch.setattr(nets.row, "__defaults__", (small, "verdigris"))
    path = tmp_path / "record" / "nets.jsonl"
    words = ["nets", "--device", "cpu", "--net", "resnet50,vit_b_16", "--way", "eager,graph", "--batch", "2", "--extent", "8", "--seconds", "0.01"]
    assert cli.main([*words, "--json", str(path)]) == 0
    (run,) = record.read(path)
    assert list(run.rows) == [f"nets/{name}/{what}/eager" for name in ("resnet50", "vit_b_16") for what in nets.WHATS] and run.source
    assert cli.main([*words, "--net", "resnet51"]) == 2 and "resnet51" in capsys.readouterr().err
    text = render._nets([run], {run.lease: "A"})
    assert "| vit_b_16/training/eager |" in text and "Lease A" in text
    assert render._nets([], {}).endswith("Not measured yet.")
    run.rows["nets/vit_b_16/training/eager"]["fault"] = "error 1, plain 0.1"
    text = render._nets([run], {run.lease: "A"})
    assert "| vit_b_16/training/eager |" not in text.split("wrong, refused")[0] and "error 1, plain 0.1" in text


def test_one_of_torchvisions():
    pytest.importorskip("torchvision")
    facts = nets.row("shufflenet_v2_x1_0", "training", "eager", ours.open_door(CPU), CPU, 2, (3, 32, 32), 0.01)
    assert "refused" not in facts and facts["wall_ratio"] > 0, facts


def test_every_network_is_torchvisions():
    models = pytest.importorskip("torchvision").models
    rooms = {room: getattr(models, room) if room else models for room, _ in nets.NETS.values()}
    assert not [name for name, (room, _) in nets.NETS.items() if not callable(getattr(rooms[room], name, None))] and len(nets.NETS) == 17
    assert nets.make("googlenet").aux1 is not None
