"""Retry delays of errors are bounded."""

import json
import math

import pytest

from operator_app.api.kinds import CONFIG_MAP
from operator_app.errors import LONGEST_WAIT_S, TransientError
from operator_app.kube.responses import refusal


@pytest.mark.parametrize(
    ("asked_s", "kept_s"),
    [
        (None, None),
        (0.0, 0.0),
        (30.0, 30.0),
        (-1.0, 0.0),
        (1e300, LONGEST_WAIT_S),
        (math.inf, LONGEST_WAIT_S),
        (-math.inf, LONGEST_WAIT_S),
        (math.nan, LONGEST_WAIT_S),
    ],
)
def test_a_requested_retry_delay_is_bounded(asked_s: float | None, kept_s: float | None) -> None:
    """``retry_after_s`` is between 0 and ``LONGEST_WAIT_S`` for any requested delay, infinity and NaN included."""
    assert TransientError("busy", retry_after_s=asked_s).retry_after_s == kept_s


@pytest.mark.parametrize(
    ("headers", "details", "kept_s"),
    [({"retry-after": "9" * 310}, {}, LONGEST_WAIT_S), ({}, {"retryAfterSeconds": -1}, 0.0)],
)
def test_a_response_can_not_request_an_unbounded_delay(
    headers: dict[str, str], details: dict[str, float], kept_s: float
) -> None:
    """A delay from a response's header or ``Status`` has the same bounds."""
    body = json.dumps({"kind": "Status", "code": 503, "details": details}).encode()
    refused = refusal(503, headers, body, kind=CONFIG_MAP)
    assert isinstance(refused, TransientError)
    assert refused.retry_after_s == kept_s
