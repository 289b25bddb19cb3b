"""Where the cloud store finds AWS credentials, and that it renews them while it runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError, MissingExtra, StoreRefused
from atoll.stores.cloud.store import CloudStore
from services.certificates import certificate
from services.fake_aws import FakeAws

pytestmark = [pytest.mark.process, pytest.mark.server]


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    """A machine without any AWS setting, and a server to talk to."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with FakeAws() as server:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url + "/nobody")
        yield server


def open_store(aws: FakeAws, query: str = "", **options: object) -> CloudStore:
    return CloudStore.from_uri(f"s3://bucket/x?endpoint={aws.url}{query}", max_retries=1, **options)


def test_keys_from_the_environment_sign(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    open_store(aws).put("a", b"x")
    assert aws.signers == ["FROM-ENV"]


def test_anonymous_requests_are_not_signed(aws: FakeAws) -> None:
    open_store(aws, "&anonymous=true").put("a", b"x")
    assert aws.signers == [None]


def test_pod_identity_is_used_and_renewed(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("pod-token")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", aws.url + "/pod")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    assert_keys_are_renewed(open_store(aws), aws)
    assert set(aws.tokens) == {"pod-token"}


def test_the_role_of_the_instance_is_used_and_renewed(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", aws.url)
    assert_keys_are_renewed(open_store(aws), aws)


def test_web_identity_is_used_and_renewed(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("irsa-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    with FakeAws(certificate=certificate(tmp_path)) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "tls.pem"))
        assert_keys_are_renewed(open_store(aws), aws)


def test_a_private_certificate_is_trusted_only_when_named(tmp_path: Path, aws: FakeAws) -> None:
    keys = {"config": {"access_key_id": "K", "secret_access_key": "s"}}
    with FakeAws(certificate=certificate(tmp_path)) as tls:
        open_store(tls, ca_file=str(tmp_path / "tls.pem"), **keys).put("a", b"x")
        assert tls.payload_hashes == ["UNSIGNED-PAYLOAD"]
        with pytest.raises(StoreRefused, match="ca_file"):
            open_store(tls, **keys).put("a", b"x")
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        open_store(aws, ca_file=str(tmp_path / "missing.pem"), **keys).put("a", b"x")


def test_a_profile_named_in_the_uri_wins_over_the_environment(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-ENV")
    _profile(tmp_path, "team", "FROM-PROFILE")
    open_store(aws, "&profile=team").put("a", b"x")
    assert aws.signers == ["FROM-PROFILE"]


def test_aws_profile_and_the_default_profile_are_used(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _profile(tmp_path, "default", "FROM-DEFAULT")
    open_store(aws).put("a", b"x")
    _profile(tmp_path, "team", "FROM-TEAM")
    monkeypatch.setenv("AWS_PROFILE", "team")
    open_store(aws).put("a", b"x")
    assert aws.signers == ["FROM-DEFAULT", "FROM-TEAM"]


def test_single_sign_on_is_used(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "https://example.awsapps.com/start"
    folder = tmp_path / ".aws" / "sso" / "cache"
    folder.mkdir(parents=True)
    token = {"startUrl": start, "region": "us-east-1", "accessToken": "sso-token", "expiresAt": "2099-01-01T00:00:00Z"}
    (folder / f"{hashlib.sha1(start.encode()).hexdigest()}.json").write_text(json.dumps(token))
    (tmp_path / ".aws" / "config").write_text(
        f"[profile sso]\nsso_start_url={start}\nsso_region=us-east-1\n"
        "sso_account_id=123456789012\nsso_role_name=trainer\n"
    )
    # In a process of its own: botocore looks for the home folder once, when it is imported.
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", aws.url)
    uri = f"s3://bucket/x?endpoint={aws.url}&profile=sso"
    code = (
        "import sys; from atoll.stores.cloud.store import CloudStore; CloudStore.from_uri(sys.argv[1]).put('a', b'x')"
    )
    subprocess.run([sys.executable, "-c", code, uri], check=True, timeout=60)
    assert aws.asked == ["/federation/credentials"]
    assert aws.signers == ["KEY-1"]


def test_an_unknown_profile_says_so(aws: FakeAws) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        open_store(aws, "&profile=nobody").put("a", b"x")


def test_a_profile_without_boto3_names_the_extra(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtra) as caught:
        open_store(aws, "&profile=team").put("a", b"x")
    assert caught.value.extra == "aws"


def test_no_credentials_at_all_is_a_refusal_with_the_ways_to_give_some(aws: FakeAws) -> None:
    with pytest.raises(StoreRefused, match=r"\?anonymous=true") as caught:
        open_store(aws).put("a", b"x")
    assert caught.value.__cause__ is not None


def test_a_key_without_its_secret_is_a_refusal_of_the_store(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "alone")
    with pytest.raises(StoreRefused, match="SecretAccessKey") as caught:
        open_store(aws).get("a")
    assert (caught.value.reason, caught.value.exit_code) == ("credentials", 4)
    assert caught.value.hint


def test_expired_credentials_are_replaced_and_the_request_made_again(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    store = open_store(aws)
    store.put("a", b"x")
    aws.expired.add("OLD")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
    store.put("b", b"x")
    assert aws.signers == ["OLD", "OLD", "NEW"]
    aws.expired.add("NEW")
    with pytest.raises(StoreRefused, match="ExpiredToken"):
        store.get("b")
    assert aws.signers[3:] == ["NEW", "NEW"]


def test_bodies_are_hashed_where_no_tls_protects_them(aws: FakeAws) -> None:
    keys = {"config": {"access_key_id": "K", "secret_access_key": "s"}}
    open_store(aws, **keys).put("a", b"x")
    open_store(aws, unsigned_payload=True, **keys).put("a", b"x")
    assert aws.payload_hashes == [hashlib.sha256(b"x").hexdigest(), "UNSIGNED-PAYLOAD"]


def test_secrets_are_in_no_text_about_the_store(aws: FakeAws) -> None:
    store = open_store(aws, config={"access_key_id": "K", "secret_access_key": "very-secret"})
    assert "very-secret" not in store.uri + repr(store) + repr(store._settings)


def _profile(home: Path, name: str, key: str) -> None:
    (home / ".aws").mkdir(exist_ok=True)
    with (home / ".aws" / "credentials").open("a") as file:
        file.write(f"[{name}]\naws_access_key_id={key}\naws_secret_access_key=s\n")


def assert_keys_are_renewed(store: CloudStore, aws: FakeAws) -> None:
    """Write until a second key signs; obstore asks for a new one at most ten times a second."""
    deadline = time.monotonic() + 30
    while "KEY-2" not in aws.signers:
        assert time.monotonic() < deadline, f"never renewed: {aws.signers[:5]}"
        store.put("a", b"x")
    assert aws.signers[0] == "KEY-1"
