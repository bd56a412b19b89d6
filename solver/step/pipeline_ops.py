"""Messages between pipeline stages: activations and their gradients, and gradients of an embedding that two stages hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.program import ONCE_PER_STEP, OTHERS, Op, message
from solver.spec.choices import TpMode
from solver.spec.cluster import placement
from solver.step.data_parallel_ops import once_message
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.problem import Problem


def send_recv_ops(problem: Problem, splits: Splits) -> list[Op]:
    """Return the send of one activation (or its gradient) to the neighbouring stage: every tensor rank sends its share.

    Where the ranks hold the whole activation (MTP), each still sends only its part, and the receivers all-gather the parts
    inside their node (Narayanan et al. 2021, arXiv 2104.04473, section 4.1; InternEvo and DeepSpeed do the same).
    """
    row = problem.model.hidden_size * problem.element_bytes.activation
    whole = splits.tokens(problem.run.seq_len) * row
    ranks_per_stage = splits.tp * splits.cp * splits.dp
    node = problem.cluster.gpus_per_domain
    spans = ranks_per_stage * splits.pp > node  # then some neighbours are in two nodes, and the slowest hop sets the pace
    stride = np.where(spans, np.maximum(node, ranks_per_stage), ranks_per_stage)
    place = placement(np.where(splits.pp > 1, 2, 1), stride, node)
    tensor = placement(splits.tp, 1, node)
    apart = problem.framework.pipeline.scatter_gather or splits.mode != TpMode.MTP
    gathers = np.where((splits.mode == TpMode.MTP) & (splits.tp > 1) & apart, 1.0, 0.0)
    return [
        Op("send_recv", "pipeline", "p2p", ONCE_PER_STEP, message(whole // np.where(apart, splits.tp, 1), place), "pp"),
        Op("send_recv", "pipeline", "all_gather", ONCE_PER_STEP, message(whole, tensor), "pp", count=gathers),
    ]


def tied_embedding_op(priced: PricedSplits) -> Op:
    """Return the sum of the embedding's gradients over the first and the last stage, where these are two and both hold it:
    tied embeddings, or multi-token prediction.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    ranks = splits.tp * splits.cp * splits.dp * np.maximum(splits.pp - 1, 1)
    place = placement(np.where(splits.pp > 1, 2, 1), ranks, problem.cluster.gpus_per_domain)
    size = table.embedding.parameters[key] * problem.element_bytes.gradient
    op = once_message("tied_embedding", "all_reduce", size, place)
    copied = problem.model.tie_word_embeddings or problem.model.num_nextn_predict_layers > 0
    copied = copied and not problem.is_frozen(OTHERS)
    present = np.where((splits.pp > 1) & ~splits.v_shaped & copied, 1.0, 0.0)  # a V ends where it begins
    return replace(op, count=present)
