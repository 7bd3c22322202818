"""A pattern of attention in a config: its mask, and the errors for invalid arguments."""

from __future__ import annotations

import pytest
import torch

from flashspan.kernels.masks import dense
from flashspan.train import parse
from flashspan.train.config import PATTERNS, AttentionSection
from flashspan.train.pattern import MAKERS, make_pattern, visible_share

T = 400
SECTIONS = {
    "causal": AttentionSection(),
    "window": AttentionSection("window", window=50),
    "dilated": AttentionSection("dilated", width=9, step=7),
    "streaming": AttentionSection("streaming", num_sinks=3, window=50),
    "longformer": AttentionSection("longformer", window=50, num_global=5),
    "random_blocks": AttentionSection("random_blocks", share=0.3, size=64, seed=1),
    "bigbird": AttentionSection("bigbird", window=20, num_global=5, num_random=1, size=64, seed=1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_causal_and_includes_the_token_itself(name: str) -> None:
    assert SECTIONS.keys() == PATTERNS.keys() == MAKERS.keys()
    mask = make_pattern(SECTIONS[name], T, torch.device("cpu"))
    seen = dense(mask, T, T)
    assert not seen.triu(1).any()
    assert seen.diagonal().all()
    assert visible_share(mask, T) == pytest.approx(int(seen.sum()) / (T * (T + 1) / 2))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    expected = {
        "window": behind <= 50,
        "dilated": (behind % 7 == 0) & (behind < 63),
        "streaming": (behind < 50) | (torch.arange(T) < 3),
        "longformer": (behind <= 50) | (torch.arange(T) < 5) | (torch.arange(T)[:, None] < 5),
    }
    if name in expected:
        assert torch.equal(seen, expected[name] & (behind >= 0))
    if name == "bigbird":  # each block of queries with an earlier block sees one more than its own
        longformer = AttentionSection("longformer", window=20, num_global=5)
        more = seen & ~dense(make_pattern(longformer, T, torch.device("cpu")), T, T)
        assert all(bool(block.any()) for block in more[3 * 64 :].split(64))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--attention.pattern=longfomer"], "got 'longfomer'; did you mean longformer\\?"),
        (["--attention.patern=window"], r"attention\.patern: did you mean .*attention\.pattern\?"),
        (["--attention.pattern=longformer", "--attention.window=9"], "longformer needs attention.num_global greater"),
        (["--attention.window=9"], "attention.pattern causal takes no other key: got attention.window 9"),
        (
            ["--attention.pattern=window", "--attention.window=9", "--attention.num_global=1"],
            "attention.pattern window takes window: got attention.num_global 1",
        ),
        (["--attention.pattern=random_blocks", "--attention.share=1.5"], "at most 1: got 1.5"),
        (["--attention.pattern=window", "--attention.window=-2"], "needs attention.window greater than 0: got -2"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(options)
