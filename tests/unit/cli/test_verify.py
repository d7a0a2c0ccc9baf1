from __future__ import annotations

import json
from typing import Any

import pytest

from breakgraph.cli.main import main
from breakgraph.graph.plan import Plan


def test_all_equal(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *model_args]) == 0
    out = capsys.readouterr().out
    assert "prefill[16]: 3 equal" in out
    assert "decode[2]: 3 equal" in out
    assert "verified 2 plans in 6 steps, all equal to eager" in out


def test_a_difference_is_exit_code_1_and_in_the_json(
    model_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Plan.replay

    def wrong(self: Plan) -> Any:
        logits = replay(self)
        if self.label == "decode[2]":
            logits[0, 0] += 1
        return logits

    monkeypatch.setattr(Plan, "replay", wrong)
    assert main(["verify", *model_args, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["num_wrong_plans"], found["num_plans"]) == (False, 1, 2)
    assert [plan["ok"] for plan in found["plans"]] == [True, False]
    assert found["plans"][1]["steps"][-1]["verdict"] == "different"
    assert found["plans"][1]["culprit"]["segment"] == 0


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err
