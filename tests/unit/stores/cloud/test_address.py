"""Addresses of cloud stores: taken apart, put together, and refused with the reason."""

from __future__ import annotations

import pytest

from atoll.errors import BadKey, ConfigError
from atoll.stores.cloud.address import parse_address
from atoll.stores.cloud.client import CloudSettings, _s3_options, is_own_endpoint


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket",
        "s3://bucket/a/b c%20d",
        "s3://bucket/x?anonymous=true&endpoint=http://127.0.0.1:9000&region=eu-west-1",
        "s3://bucket/x?path_style=false&profile=team",
        "gs://bucket/x",
        "az://container/x?account=me",
    ],
)
def test_an_address_comes_back_as_it_was_written(uri: str) -> None:
    assert parse_address(uri).uri == uri


@pytest.mark.parametrize(
    ("other", "usual"),
    [
        ("azure://c/x", "az://c/x"),
        ("gcs://b/x/", "gs://b/x"),
        ("s3://b/x?endpoint=http%3A%2F%2Fh%3A1%2F", "s3://b/x?endpoint=http://h:1"),
    ],
)
def test_other_spellings_become_the_usual_one(other: str, usual: str) -> None:
    assert parse_address(other).uri == usual


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("s3://", "bucket"),
        ("s3://key:secret@bucket/x", "bucket"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("ftp://bucket", "scheme"),
        ("s3://bucket?regoin=x", "option"),
        ("s3://bucket?secret_access_key=x", "option"),
        ("gs://bucket?region=x", "option"),
        ("s3://bucket?anonymous=perhaps", "anonymous"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "endpoint"),
        ("s3://bucket?endpoint=http://me:secret@host", "endpoint"),
    ],
)
def test_a_bad_address_is_refused_with_the_reason(uri: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(uri)
    assert caught.value.reason == reason


def test_a_misspelt_option_says_which_one_may_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"`regoin`.*`region`\?"):
        parse_address("s3://bucket?regoin=x")


def test_keys_and_paths_lead_to_each_other() -> None:
    for address in (parse_address("s3://b/p/q"), parse_address("s3://b")):
        assert address.key(address.path("a/b")) == "a/b"
    with pytest.raises(BadKey, match="1024"):
        parse_address("s3://b/" + "/".join(["p" * 100] * 3)).path("/".join(["k" * 200] * 4))


@pytest.mark.parametrize(
    ("uri", "virtual", "endpoint"),
    [
        ("s3://bucket", True, None),
        ("s3://my.bucket", False, None),
        ("s3://bucket?endpoint=https://host", False, "https://host"),
        ("s3://bucket?endpoint=https://host&path_style=false", True, "https://bucket.host"),
        ("s3://bucket?path_style=true", False, None),
    ],
)
def test_buckets_are_addressed_as_the_endpoint_expects(
    uri: str, virtual: bool, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    config = _s3_options(parse_address(uri), CloudSettings())["config"]
    assert config["virtual_hosted_style_request"] is virtual
    assert config.get("endpoint") == endpoint
    assert config["unsigned_payload"] is True


def test_only_a_vendors_own_service_is_trusted_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert not is_own_endpoint(parse_address("s3://b"))
    assert not is_own_endpoint(parse_address("s3://b?endpoint=https://s3.eu-west-1.amazonaws.com"))
    assert is_own_endpoint(parse_address("s3://b?endpoint=https://amazonaws.com.evil.example"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert is_own_endpoint(parse_address("s3://b"))


def test_patience_grows_with_the_upload_in_doubling_steps() -> None:
    settings = CloudSettings(read_timeout_s=20, slowest_upload_bytes_per_s=1e6)
    assert [settings.patience_s(size) for size in (0, 20_000_000, 20_000_001, 64 << 20)] == [20, 20, 40, 80]
