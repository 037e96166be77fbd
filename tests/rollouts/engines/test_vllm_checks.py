"""Is it the right server: what is found out before a turn is sampled, and the probe of its weights after each sync."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support import fake_vllm, recorded
from support.fake_vllm import FakeVLLM
from support.models import VOCAB, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from harts_hf.rollouts.engines import EngineError, SamplingSettings, TurnRequest, vllm_probe
from harts_hf.rollouts.engines.vllm_probe import LogProbGapError, agree
from harts_hf.rollouts.engines.vllm_server import ServerOptions, VLLMServerEngine


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_5_text").eval()


@pytest.fixture
def server(model):
    with FakeVLLM(copy.deepcopy(model), tokenizer=recorded.tokenizer(), max_model_len=50) as server:
        yield server


class Trainer:
    """What the engine needs of a trainer; scores with the unpatched model, row by row."""

    def __init__(self, model, server, **arguments):
        self.model, self.processing_class = model, recorded.tokenizer()
        self.accelerator = Accelerator(cpu=True)
        self.state = SimpleNamespace(global_step=0)
        self.eos_token_ids = [1]
        self.num_scored = 0
        self.args = SimpleNamespace(
            **{
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_server_base_url": server.url,
                "vllm_server_host": "0.0.0.0",
                "vllm_server_port": 8000,
                "vllm_server_timeout": 0.0,
                "vllm_structured_outputs_regex": None,
                "generation_kwargs": None,
                "activation_checkpointing_kwargs": None,
                "temperature": 0.8,
                "top_p": 0.7,
                "top_k": 12,
                "min_p": None,
                "repetition_penalty": 1.0,
                "seed": 3,
                **arguments,
            }
        )

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None):
        assert not torch.is_grad_enabled() and bool(attention_mask.all())
        self.num_scored += 1
        logits = torch.cat([model(input_ids=row[None]).logits for row in input_ids]) / self.args.temperature
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0]
        return logprobs[:, -logits_to_keep:], None, None


def start(server: FakeVLLM, **fields) -> VLLMServerEngine:
    """An engine, from nothing."""
    return VLLMServerEngine(server.url, settings=SamplingSettings(), **{"vocab_size": VOCAB, **fields})


def test_what_an_engine_knows(server):
    """The served model that is no adapter, or the one that is named, and the smaller of two lengths."""
    with start(server) as engine:
        assert (engine.model, engine.max_positions, engine.num_read_tokens) == ("tiny", 50, 0)
    with start(server, max_positions=20) as engine, pytest.raises(ValueError, match="in 20 positions, got 20 tokens"):
        engine.submit(TurnRequest(history=(3,) * 20, max_tokens=1, seed=0))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "large"}, "to serve large, got adapter, tiny"),
        ({"vocab_size": VOCAB + 1}, "last of the trainer's 49 tokens: is it another model's.* out of vocabulary"),
        ({"vocab_size": 20}, "below the trainer's vocabulary size 20"),
    ],
    ids=["model", "smaller vocabulary", "larger vocabulary"],
)
def test_other_models(server, fields, said):
    """A larger vocabulary shows by its token ids."""
    with pytest.raises(EngineError, match=said), start(server, **fields) as engine:
        requests = [TurnRequest(history=(3,), max_tokens=40, seed=seed) for seed in range(3)]
        [engine.submit(request).result() for request in requests]


def test_temperatures_that_vllm_would_change(server):
    """It raises those below 0.01."""
    with pytest.raises(ValueError, match=r"at least 0\.01, to which vLLM raises lower ones, got 0.001"):
        VLLMServerEngine(server.url, settings=SamplingSettings(temperature=0.001), vocab_size=VOCAB)


def test_raw_logprobs(server):
    """vLLM's default reports something else than it draws from: named before anything is sampled."""
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(EngineError, match=r"with `vllm serve \.\.\. --logprobs-mode processed_logprobs`"):
        start(server)


@pytest.mark.exhaustive
def test_a_server_that_is_not_there_yet(model):
    """It is waited for, so long as is said."""
    server = FakeVLLM(model)
    closed = "http://127.0.0.1:9"  # nobody listens to "discard"
    with pytest.raises(EngineError, match=r"within 0.6 seconds \(vllm_server_timeout\); start one with `vllm serve`"):
        VLLMServerEngine(closed, settings=SamplingSettings(), vocab_size=VOCAB, server_timeout=0.6)
    late = threading.Timer(0.5, server.__enter__)
    late.start()
    with start(server, server_timeout=30) as engine:
        assert engine.model == "tiny"
    late.join()
    server.stop()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"use_vllm": False}, "got use_vllm=False"),
        ({"vllm_mode": "colocate"}, "got vllm_mode='colocate'"),
        ({"generation_kwargs": {"top_a": 1}}, "expected no generation_kwargs"),
        ({"vllm_structured_outputs_regex": "a*"}, "expected no vllm_structured_outputs_regex"),
        ({"repetition_penalty": 1.1}, "expected repetition_penalty 1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_be_ignored(model, server, arguments, said):
    """Refused by name, before the server is asked."""
    with pytest.raises(ValueError, match=said):
        VLLMServerEngine.from_trainer(Trainer(model, server, **arguments))
    assert not server.bodies


@pytest.mark.exhaustive
def test_from_trainer(model, server):
    """Its address, limits and settings; probed once a step, before the first turn, at its temperature without cuts."""
    trainer = Trainer(model, server)
    gaps = []
    for step in (0, 0, 1):
        trainer.state.global_step = step
        with VLLMServerEngine.from_trainer(trainer) as engine:
            gaps.append(engine.probe_gap)
            assert engine.num_read_tokens == 0
            engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0)).result()
        last = server.bodies[-1]
        assert [last[name] for name in ("temperature", "top_p", "top_k", "stop_token_ids")] == [0.8, 0.7, 12, [1]]
    # fp32, rows of a batch against rows alone; the largest seen was 2e-7.
    assert gaps[1] is None and max(gaps[0], gaps[2]) < 1e-5
    assert trainer.num_scored == 2
    probes = [body for body in server.bodies if body["temperature"] == 0.8 and body["top_p"] == 1.0]
    assert [(len(body["prompt"]), body["n"], body["max_tokens"]) for body in probes] == [
        (1, 2, 49),
        (18, 1, 32),
        (18, 1, 32),
    ] * 2
    assert all(not body["stop_token_ids"] and body["top_k"] == 0 for body in probes)


def test_the_address_of_a_host_and_a_port(model, server):
    """As TRL makes it."""
    port = int(server.url.rsplit(":", 1)[1])
    trainer = Trainer(model, server, vllm_server_base_url=None, vllm_server_host="127.0.0.1", vllm_server_port=port)
    with VLLMServerEngine.from_trainer(trainer, options=ServerOptions(max_logprob_gap=None)) as engine:
        assert engine.probe_gap is None and engine.client.url == server.url


@pytest.mark.exhaustive
@pytest.mark.parametrize("corrupted", ["A_log", "conv1d.weight", "lm_head.weight"])
def test_corrupted_weights_are_found(model, server, corrupted):
    """One tensor of the server's is not what it was: the run stops, and stays stopped."""
    parameter = next(p for name, p in server.model.named_parameters() if name.endswith(corrupted))
    parameter.data = parameter.data.roll(1, 0) + (2.0 if corrupted == "A_log" else 0.0)
    trainer = Trainer(model, server)
    for _ in range(2):
        with pytest.raises(LogProbGapError, match=r"weights at step 0, got .* above the limit 0.1. Is it the model"):
            VLLMServerEngine.from_trainer(trainer)
    with VLLMServerEngine.from_trainer(trainer, options=ServerOptions(max_logprob_gap=100.0)) as engine:
        assert engine.probe_gap > 0.1


@pytest.mark.exhaustive
def test_scores_that_are_no_numbers(model, server):
    """NaN is above every limit."""
    trainer = Trainer(model, server)
    trainer._get_per_token_logps_and_entropies = lambda model, ids, *_, **__: (
        torch.full(ids[:, 1:].shape, torch.nan),
    )
    with pytest.raises(LogProbGapError, match="differ by nan nats"):
        VLLMServerEngine.from_trainer(trainer)


@pytest.mark.exhaustive
def test_another_tokenizer(model, server):
    """Found by a text that both cut; a server that cannot be asked is not."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t5"))
    server.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t5")
    with pytest.raises(EngineError, match="to have the trainer's tokenizer, got one that cuts a text otherwise"):
        VLLMServerEngine.from_trainer(Trainer(model, server))
    with FakeVLLM(model) as silent:
        VLLMServerEngine.from_trainer(Trainer(model, silent)).close()


def test_what_one_process_finds_every_process_raises(monkeypatch):
    """Even one that found nothing, with the other's words."""
    others = {"said": ["EngineError: the server of process 0 is gone"]}
    monkeypatch.setattr(vllm_probe, "gather_object", lambda own: others["said"] + own)
    accelerator = SimpleNamespace(num_processes=2)
    said = "process 0 of 2 failed: EngineError: the server of process 0 is gone"
    with pytest.raises(EngineError, match=said), agree(accelerator):
        pass
    with pytest.raises(KeyError, match="own"), agree(accelerator):
        raise KeyError("own")
    others["said"] = [None]
    with agree(accelerator):
        pass


@pytest.mark.exhaustive
def test_a_probe_that_fails_is_not_taken_for_done(model, server):
    """The next call of the step probes again."""
    trainer = Trainer(model, server)
    server.faults.extend([lambda request, body: None, fake_vllm.status(400, "not yet")])
    with pytest.raises(EngineError, match="not yet"):
        VLLMServerEngine.from_trainer(trainer)
    with VLLMServerEngine.from_trainer(trainer) as engine:
        assert engine.probe_gap is not None
