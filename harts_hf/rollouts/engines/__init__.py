"""Engines: what samples the policy's turns."""

from harts_hf.rollouts.engines.engine import Engine, EngineError, SampledTurn, SamplingSettings, TurnRequest

__all__ = ["Engine", "EngineError", "SampledTurn", "SamplingSettings", "TurnRequest"]
