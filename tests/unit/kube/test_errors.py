"""Answers of the API server, and no answers, as Atoll's errors."""

from __future__ import annotations

import json

import pytest

from atoll.errors import AuthError, BackendError, BackendUnavailable, CapacityError, ConfigError, RunNotFound
from atoll.kube.errors import Refusal, translated

DOWN = (
    'Internal error occurred: failed calling webhook "mjob.kb.io": failed to call webhook: Post '
    '"https://127.0.0.1:9443/mutate-batch-v1-job?timeout=10s": dial tcp 127.0.0.1:9443: connect: connection refused'
)


_TERMINATING = 'jobs.batch "a" is forbidden: unable to create new content in namespace n because it is being terminated'


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (400, {}, ConfigError, "invalid"),
        (401, {}, AuthError, "login"),
        (403, {}, AuthError, "forbidden"),
        (403, {"message": "exceeded quota: team"}, CapacityError, "quota"),
        (403, {"message": "failed quota: team: must specify cpu"}, CapacityError, "quota"),
        (403, {"message": 'User "u" cannot get jobs in the namespace "team-quota"'}, AuthError, "forbidden"),
        (404, {}, RunNotFound, ""),
        (409, {"reason": "AlreadyExists"}, BackendError, "taken"),
        (409, {"reason": "Conflict"}, BackendError, "changed"),
        (410, {}, RunNotFound, "expired"),
        (422, {}, ConfigError, "invalid"),
        (429, {}, BackendUnavailable, "throttled"),
        (503, {}, BackendUnavailable, ""),
        (500, {"message": DOWN}, BackendUnavailable, "webhook"),
        (403, {"message": 'admission webhook "vjob.kb.io" denied the request: no'}, ConfigError, "denied"),
        (403, {"message": _TERMINATING}, ConfigError, "denied"),
        (403, {"message": 'admission webhook "x" denied the request: bob is not authorized'}, AuthError, "forbidden"),
    ],
)
def test_each_status_is_one_error(status, body, kind, reason):
    found = translated(Refusal.of(status, json.dumps(body).encode(), {}), "Job `x`", "submit", "kubernetes")
    assert (type(found), found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("executor", "backend"),
    [("kubernetes", "kubernetes"), ("appwrapper", "appwrapper"), ("kubernetes_mcad", "appwrapper")],
)
def test_a_missing_permission_names_the_doctor_of_this_backend(executor, backend):
    found = translated(Refusal(403, {"message": "no"}), "Job `x`", "submit", executor)
    assert f"`atoll doctor {backend}`" in found.hint


def test_a_controller_that_is_down_is_named():
    found = translated(Refusal(500, {"message": DOWN}), "Job `x`", "submit", "kubernetes")
    assert found.retryable
    assert "`mjob.kb.io`" in found.hint


def test_a_page_of_a_proxy_and_no_answer_may_be_tried_again():
    page = Refusal.of(502, b"<html>bad gateway</html>", {"Retry-After": "3"})
    assert page.retry_after_s == 3.0
    for exc in (page, TimeoutError("late"), ConnectionResetError("gone")):
        assert type(translated(exc, "x", "status", "kubernetes")) is BackendUnavailable
