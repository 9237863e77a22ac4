"""Tensors of a microbatch."""

from __future__ import annotations

import numpy as np
import torch

from rljob.trainer.batch import Row, collate

CPU = torch.device("cpu")


def test_positions_predict_the_next_token_and_padding_is_masked():
    short = Row(np.array([5, 6, 7]), np.array([0, 0, -1], np.float32), np.array([False, False, True]), np.zeros(3))
    long = Row(
        np.array([1, 2, 3, 4]), np.array([0, -2, 0, -3], np.float32), np.array([False, True, False, True]), np.zeros(4)
    )
    micro = collate([short, long], [1.0, 0.5], CPU)
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]
    assert micro.keep_K.tolist() == [0, 1, 2]
    assert micro.targets_BK.tolist() == [[6, 7, 0], [2, 3, 4]]
    assert micro.mask_BK.tolist() == [[False, True, False], [True, False, True]]
    assert micro.behavior_BK.tolist() == [[0, -1, 0], [-2, 0, -3]]
    assert micro.temperature_B.tolist() == [1.0, 0.5]


def test_prompts_need_no_logits_and_an_empty_microbatch_has_no_weight():
    prompt = Row(np.arange(6), np.zeros(6, np.float32), np.arange(6) >= 5, np.zeros(6))
    assert collate([prompt], [1.0], CPU).keep_K.tolist() == [4]
    empty = collate([], [], CPU)
    assert empty.token_ids_BL.shape == (1, 2)
    assert empty.mask_BK.tolist() == [[False]]
