"""The query stage that needs no network and no language model."""

from __future__ import annotations

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import QaConfig
from writer_rl.data.embedding import Embedder
from writer_rl.rewards.qa.answer import ExtractiveReader
from writer_rl.rewards.qa.interfaces import QueryStage
from writer_rl.rewards.qa.judge import TokenF1Judge
from writer_rl.rewards.qa.project import RuleProjector
from writer_rl.rewards.qa.retrieve import BudgetRetriever

EMBEDDED_STAGE = "embedded/1"


def embedded_stage(config: QaConfig, embedder: Embedder) -> QueryStage:
    """The offline stage: rules, BM25 and vectors, extraction, token F1.

    Raises:
        InputError: The configuration asks for a supplementary question, which needs a language model.
    """
    if config.ask:
        raise InputError("reward.qa.ask", "is true, but the embedded reader cannot ask", "set it to false")
    retriever = BudgetRetriever(config, embedder)
    return QueryStage(EMBEDDED_STAGE, RuleProjector(), retriever, ExtractiveReader(), TokenF1Judge())
