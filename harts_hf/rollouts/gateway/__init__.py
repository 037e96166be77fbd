"""Any agent by URL: an OpenAI-compatible endpoint whose requests become the samples of episodes."""

from harts_hf.rollouts.gateway.agents import Agent, AgentAccess, AgentFailure, FunctionAgent
from harts_hf.rollouts.gateway.answers import AssistantMessage, ToolCall
from harts_hf.rollouts.gateway.collector import AgentError, AgentRolloutCollector, agent_reward
from harts_hf.rollouts.gateway.commands import CommandAgent
from harts_hf.rollouts.gateway.episodes import AgentEpisode, AgentSample
from harts_hf.rollouts.gateway.formats import ChatFormat, TemplateFormat, TrlFormat
from harts_hf.rollouts.gateway.recording import EpisodeRow, Recording
from harts_hf.rollouts.gateway.requests import ApiError, ChatRequest
from harts_hf.rollouts.gateway.server import Gateway
from harts_hf.rollouts.gateway.sessions import Session
from harts_hf.rollouts.gateway.splicing import Drift
from harts_hf.rollouts.gateway.turns import EngineTurns, LengthLimits, TurnSource

__all__ = [
    "Agent",
    "AgentAccess",
    "AgentEpisode",
    "AgentError",
    "AgentFailure",
    "AgentRolloutCollector",
    "AgentSample",
    "ApiError",
    "AssistantMessage",
    "ChatFormat",
    "ChatRequest",
    "CommandAgent",
    "Drift",
    "EngineTurns",
    "EpisodeRow",
    "FunctionAgent",
    "Gateway",
    "LengthLimits",
    "Recording",
    "Session",
    "TemplateFormat",
    "ToolCall",
    "TrlFormat",
    "TurnSource",
    "agent_reward",
]
