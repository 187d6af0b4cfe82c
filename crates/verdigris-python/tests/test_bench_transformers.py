"""The suite of Hugging Face's networks on the CPU, at the size ``tiny``."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")

from verdigris.bench import cli, ours, record, render, transformer_nets
from verdigris.bench.peers import Refused

torch.set_num_threads(1)

CPU = torch.device("cpu")


def test_the_suite_as_a_command(tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "transformers.jsonl"
    words = ["transformers", "--tiny", "--device", "cpu", "--mode", "instant", "--seconds", "0.01", "--json", str(path)]
    assert cli.main(words) == 0
    (run,) = record.read(path)
    assert [key.removeprefix("transformers/") for key in run.rows] == [
        *("llama_1b/prefill_1x24/eager", "llama_1b/prefill_2x24/eager", "llama_1b/decode_2x24/eager", "llama_1b/training_2x24/eager"),
        *("vit_b_16/inference_8/eager", "vit_b_16/training_8/eager"),
    ]
    for key, facts in run.rows.items():
        assert "refused" not in facts and "fault" not in facts, facts
        assert facts["wall_ratio"] > 0 and facts["host_ratio"] > 0 and 0 < facts["error_plain"] < 0.1, facts
        assert ("worst_gradient" in facts) == ("training" in key) and ("cache" in facts) == ("llama" in key)
    text = render._nets([run], {run.lease: "A"}, "transformers")
    assert "| llama_1b/decode_2x24/eager |" in text and text.startswith("## Hugging Face")
    assert cli.main([*words, "--net", "llama_2b"]) == 2 and "llama_2b" in capsys.readouterr().err


def test_a_decoded_token_is_the_one_behind_the_cache_and_each_step_decodes_it_again():
    pytest.importorskip("transformers")
    use = transformer_nets.Use("llama_1b", "decode", 2, 16)
    step = transformer_nets.Step(transformer_nets.make("llama_1b", "tiny", torch.device("cpu")).double().eval(), use)
    cache = step.arguments["cache"]
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    first, second = step.answers()["logits"], step.answers()["logits"]
    assert torch.equal(first, second) and first.shape == (2, 1, 128)
    for layer, (keys, values) in zip(cache.layers, kept):
        assert torch.equal(layer.keys[:, :, :15], keys[:, :, :15]) and not torch.equal(layer.keys[:, :, 15], keys[:, :, 15])
        assert torch.equal(layer.values[:, :, :15], values[:, :, :15]) and int(layer.cumulative_length) == 15
        # The last place is written before it is read: what stood there does not matter.
        layer.keys[:, :, 15], layer.values[:, :, 15] = 7.0, 7.0
    assert torch.equal(step.answers()["logits"], first)


def test_a_wrong_network_is_a_fault_and_absent_packages_are_refusals():
    pytest.importorskip("transformers")
    use, door = transformer_nets.Use("llama_1b", "prefill", 1, 8), ours.open_door(CPU, mode="instant")

    class Wrong:
        def attention_of_transformers(self):
            return "sdpa"

        def convert(self, network):
            network.model.layers[1].mlp.up_proj.weight.data *= 1.1
            return network

    facts = transformer_nets.row(use, "eager", Wrong(), CPU, 0.01, "tiny")
    assert facts["fault"].startswith("error "), facts
    absent = transformer_nets.row(use, "eager", ours.Absent("no package here"), CPU, 0.01, "tiny")
    assert absent["refused"] == "no package here"

    def nothing(net, size, device):
        raise Refused("transformers cannot be imported")

    assert transformer_nets.row(use, "eager", door, CPU, 0.01, "tiny", nothing)["refused"].startswith("transformers")


def test_without_transformers_each_row_says_so(monkeypatch):
    import builtins

    found = builtins.__import__

    def blocked(name, *rest):
        if name.split(".")[0] == "transformers":
            raise ImportError("it is not installed")
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(Refused, match="it is not installed"):
        transformer_nets.make("llama_1b", "tiny", torch.device("cpu"))


def test_errors_of_gradients_are_told_by_name():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    plain = transformer_nets.errors(exact, {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])})
    mine = transformer_nets.errors(exact, {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([4.5])})
    assert plain == {"a": 0.5, "b": 0.0} and mine == {"a": 1.0, "b": 0.5}
    facts = transformer_nets._told_errors(exact, {"plain": plain, "ours": mine}, True)
    assert facts["error_plain"] == pytest.approx(0.1) and facts["error_ours"] == pytest.approx(math.sqrt(1.25) / 5)
    assert facts["worst_gradient"] == "a" and facts["worst_gradient_ratio"] == 2.0 and facts["gradients_above"] == 1
    transformer_nets.nets._judge(facts, transformer_nets.MOST_ERROR)
    assert "fault" in facts
    gone = transformer_nets._told_errors(exact, {"plain": plain, "ours": transformer_nets.errors(exact, {"a": exact["a"]})}, False)
    assert math.isnan(gone["error_ours"])
    transformer_nets.nets._judge(gone, transformer_nets.MOST_ERROR)
    assert "fault" in gone
