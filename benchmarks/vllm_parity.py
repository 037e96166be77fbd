"""A real vLLM server against the unpatched model in Transformers, by hand: `python -m benchmarks.vllm_parity --help`.

    python -m benchmarks.vllm_parity --make MODEL                     # a tiny qwen3_next (bfloat16) with a tokenizer
    vllm serve MODEL --logprobs-mode processed_logprobs --max-model-len 1024 --dtype bfloat16
    python -m benchmarks.vllm_parity --model MODEL --url http://localhost:8000

Of conversations that fork: differences of log-probs (the unpatched model reads each row alone, in bfloat16 and in
float32), greedy tokens and how near a tie others were, draws that depend on their seed only, turns
a second. With `--other MODEL2` (made with another `--seed`) the gap to a wrong model, which a probe has to notice.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.machine import RESULTS, describe_machine
from harts_hf.rollouts.engines import SampledTurn, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.transformers import TransformersEngine
from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, seed: int) -> None:
    """Writes a qwen3_next of 1.4 M random parameters (linear heads of 128: vLLM's CPU kernels take no smaller)."""
    bytes_ = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        intermediate_size=128,
        max_position_embeddings=2048,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:  # a head that gives distributions of about 4 nats
                scale = 0.5 if "embed" in name else (2.0 if "lm_head" in name else 0.6) / parameter.shape[-1] ** 0.5
                parameter.copy_(noise * scale)
            else:
                parameter.copy_(parameter + 0.1 * noise)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Oracle:
    """The unpatched model, one row at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, corrupted: str = "") -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for name, parameter in self._model.named_parameters():
            if corrupted and name.endswith(corrupted):  # of the first layer that has one
                parameter.data.zero_()
                break

    @torch.no_grad()
    def scores(self, tokens: list[int]) -> torch.Tensor:
        """``[L, V]`` float32 logits."""
        return self._model(input_ids=torch.tensor([tokens])).logits[0].float()

    def logprobs(self, history: tuple[int, ...], turn: SampledTurn, temperature: float) -> np.ndarray:
        """``[T]`` of a turn's tokens."""
        tokens = [*history, *turn.token_ids]
        scores = self.scores(tokens)[len(history) - 1 : -1] / temperature
        return scores.log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0].numpy()


def differences(engine: VLLMServerEngine, oracles: dict[str, Oracle], histories: list[tuple[int, ...]]) -> dict:
    """Absolute differences of log-probs in nats, over forked turns."""
    futures = [
        engine.submit(TurnRequest(history=history, max_tokens=48, seed=seed, count=4))
        for seed, history in enumerate(histories)
    ]
    engine.run(lambda: all(future.done() for future in futures))
    report = {}
    for name, oracle in oracles.items():
        gaps = [
            np.abs(np.array(turn.logprobs) - oracle.logprobs(history, turn, 1.0))
            for history, future in zip(histories, futures, strict=True)
            for turn in future.result()
        ]
        every = np.concatenate(gaps)
        probes = [np.concatenate(gaps[i : i + 4]).mean() for i in range(0, len(gaps), 4)]
        report[name] = {
            "tokens": len(every),
            "mean": float(every.mean()),
            "99th_percentile": float(np.quantile(every, 0.99)),
            "max": float(every.max()),
            "largest_mean_of_a_request": float(max(probes)),
        }
    return report


def greedy(url: str, oracles: dict[str, Oracle], histories: list[tuple[int, ...]], vocab_size: int) -> dict:
    """Tokens near temperature 0 against the oracle's likeliest, given the server's tokens before."""
    # At vLLM's least temperature; of logits that differ by 0.1 the larger one is drawn all but once in 22,000 times.
    settings = SamplingSettings(temperature=0.01)
    report = {}
    with VLLMServerEngine(url, settings=settings, vocab_size=vocab_size) as engine:
        futures = [engine.submit(TurnRequest(history=h, max_tokens=48, seed=0)) for h in histories]
        engine.run(lambda: all(future.done() for future in futures))
        turns = [future.result()[0] for future in futures]
    for name, oracle in oracles.items():
        equal, margins = 0, []
        for history, turn in zip(histories, turns, strict=True):
            scores = oracle.scores([*history, *turn.token_ids])[len(history) - 1 : -1]
            given = scores.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
            below = scores.max(-1).values - given
            equal += int((below == 0).sum())
            margins += below[below > 0].tolist()
        total = sum(len(turn.token_ids) for turn in turns)
        report[name] = {"tokens": total, "equal": equal, "largest_logit_margin_where_not": max(margins, default=0.0)}
    return report


def both_engines(url: str, folder: Path, oracle: Oracle, histories: list[tuple[int, ...]]) -> dict:
    """Turns near temperature 0 of the engine over the server and of the one in this process, both in bfloat16."""
    settings = SamplingSettings(temperature=0.01)
    requests = [TurnRequest(history=history, max_tokens=48, seed=0) for history in histories]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    turns: list[list[SampledTurn]] = []
    for engine in (
        VLLMServerEngine(url, settings=settings, vocab_size=model.config.vocab_size),
        TransformersEngine(model, settings=settings),
    ):
        with engine, torch.no_grad():
            futures = [engine.submit(request) for request in requests]
            engine.run(lambda futures=futures: all(future.done() for future in futures))
            turns.append([future.result()[0] for future in futures])
    equal, before, margins = 0, 0, []
    for history, server, own in zip(histories, *turns, strict=True):
        pairs = enumerate(zip(server.token_ids, own.token_ids, strict=True))
        first = next((index for index, (one, other) in pairs if one != other), None)
        equal += first is None
        before += len(server.token_ids) if first is None else first
        if first is not None:
            scores = oracle.scores([*history, *server.token_ids[:first]])[-1]
            margins.append(abs(float(scores[server.token_ids[first]] - scores[own.token_ids[first]])))
    return {
        "turns": len(histories),
        "equal": equal,
        "tokens_before_first_differences": before,
        "tokens": sum(len(turn.token_ids) for turn in turns[0]),
        "largest_float32_logit_margin_at_first_differences": max(margins, default=0.0),
    }


def seeds(engine: VLLMServerEngine, histories: list[tuple[int, ...]]) -> dict:
    """How many tokens of a request come again, alone and amid others."""
    request = TurnRequest(history=histories[0], max_tokens=32, seed=11, count=3)

    def drawn(others: int) -> list[tuple[int, ...]]:
        futures = [engine.submit(request)]
        futures += [engine.submit(TurnRequest(history=h, max_tokens=32, seed=5)) for h in histories[1 : 1 + others]]
        engine.run(lambda: all(future.done() for future in futures))
        return [turn.token_ids for turn in futures[0].result()]

    first, again, amid = drawn(0), drawn(0), drawn(6)
    other = engine.submit(TurnRequest(history=histories[0], max_tokens=32, seed=12, count=3)).result()
    return {
        "same_alone": first == again,
        "same_amid_others": first == amid,
        "continuations_differ": len(set(first)) == 3,
        "another_seed_differs": not {turn.token_ids for turn in other} & set(first),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="MODEL", help="write a tiny model here, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the model that is made")
    parser.add_argument("--model", type=Path, help="the folder that is served")
    parser.add_argument("--other", type=Path, help="a model that is not served")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_parity.json", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.make:
        make_model(arguments.make, arguments.seed)
        return
    if arguments.model is None:
        parser.error("expected --model or --make")
    oracles = {
        "bfloat16": Oracle(arguments.model, torch.bfloat16),
        "float32": Oracle(arguments.model, torch.float32),
    }
    for name in ("A_log", "dt_bias", "conv1d.weight"):
        oracles[f"one {name} zeroed"] = Oracle(arguments.model, torch.float32, corrupted=name)
    if arguments.other:
        oracles["another model"] = Oracle(arguments.other, torch.float32)
    vocab_size = AutoConfig.from_pretrained(arguments.model).vocab_size
    rng = np.random.default_rng(0)
    histories = [tuple(rng.integers(0, 256, size).tolist()) for size in (1, 3, 17, 63, 64, 65, 100, 127, 128, 200)]
    with VLLMServerEngine(arguments.url, settings=SamplingSettings(), vocab_size=vocab_size) as engine:
        version = engine.client.get("/version").get("version")
        report = {
            "machine": describe_machine(),
            "vllm": version,
            "differences_in_nats": differences(engine, oracles, histories),
            "near_temperature_0": greedy(arguments.url, oracles, histories, vocab_size),
            "both_engines_near_temperature_0": both_engines(
                arguments.url, arguments.model, oracles["float32"], histories
            ),
            "seeds": seeds(engine, histories),
        }
        start = time.perf_counter()
        futures = [
            engine.submit(TurnRequest(history=histories[i % 10], max_tokens=16, seed=i, count=2)) for i in range(100)
        ]
        engine.run(lambda: all(future.done() for future in futures))
        report["turns_per_second"] = 200 / (time.perf_counter() - start)
    print(json.dumps(report, indent=2))
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
