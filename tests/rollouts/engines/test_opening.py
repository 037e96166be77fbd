"""Which engine a trainer's arguments open."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.models import tiny_model

from harts_hf.rollouts.engines import EngineError, TurnRequest
from harts_hf.rollouts.engines.opening import open_engine
from harts_hf.rollouts.engines.transformers import TransformersEngine
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer


@pytest.fixture
def make_trainer(tmp_path):
    """A trainer with a tiny hybrid policy; arguments can be changed."""

    def make(**changes):
        tokenizer = ShelfEnvironment().tokenizer()
        args = TreeGRPOConfig(
            **{
                "output_dir": str(tmp_path),
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "use_cpu": True,
                "bf16": False,
                "report_to": "none",
                **changes,
            }
        )
        return TreeGRPOTrainer(
            tiny_model("bailing_hybrid", vocab_size=len(tokenizer)),
            lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["lamp wanted"]}),
            processing_class=tokenizer,
        )

    return make


def test_the_trainers_own_model_samples_as_its_arguments_say(make_trainer):
    """Temperature, cuts and end tokens are the trainer's; the engine is closed when its block is left."""
    trainer = make_trainer(temperature=0.5, top_k=1)
    end = trainer.processing_class.eos_token_id
    with open_engine(trainer) as engine:
        assert isinstance(engine, TransformersEngine)
        future = engine.submit(TurnRequest(history=(5, 6), max_tokens=30, seed=0, count=3, stop=("no such text",)))
        engine.run(future.done)
        turns = future.result()
    assert len({turn.token_ids for turn in turns}) == 1  # top_k 1
    assert set(turns[0].logprobs) == {0.0}
    assert all(end not in turn.token_ids[:-1] for turn in turns)
    with pytest.raises(EngineError, match="got a closed one"):
        engine.submit(TurnRequest(history=(5, 6), max_tokens=1, seed=0))


def test_a_repetition_penalty_is_refused(make_trainer):
    """Probabilities would depend on more than the loss knows."""
    with (
        pytest.raises(ValueError, match=r"expected repetition_penalty 1\.0"),
        open_engine(make_trainer(repetition_penalty=1.2)),
    ):
        pass


def test_sharded_parameters_are_refused():
    """Processes would make different numbers of forwards and wait for one another for ever."""
    trainer = SimpleNamespace(use_vllm=False, is_fsdp_enabled=True)
    with (
        pytest.raises(ValueError, match="expected parameters that are whole while sampling"),
        open_engine(trainer),
    ):
        pass
