"""JobSettings: how training jobs of this executor are set up, and what does not fit together in that. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class JobSettings:
    """The settings of `atoll run --on sagemaker`, all optional until something is planned."""

    role_arn: str = ""
    """What replicas may do: an IAM role that SageMaker takes for them."""
    image_uri: str = ""
    """Used where a placement has no image of its own."""
    output_s3_path: str = ""
    """Where SageMaker puts what a job leaves in /opt/ml/model."""
    instance_type: str = "ml.g5.2xlarge"
    cpu_instance_type: str = "ml.m5.xlarge"
    volume_size_gb: int = 100
    spot: bool = False
    checkpoint_s3_uri: str | None = None
    """Each rank has a folder of its own below it, kept in step with `checkpoint_local_path`."""
    checkpoint_local_path: str = "/opt/ml/checkpoints"
    max_wait_s: int | None = None
    """With `spot`: time limit and waiting for machines together. An hour more than the limit by default."""
    max_pending_s: int | None = None
    keep_alive_s: int | None = None
    """Keep machines warm after the end, for the next job. They are billed all the while."""
    retry_attempts: int | None = None
    """How often SageMaker starts a job again after an internal error of its own; never after one of yours."""
    security_group_ids: Sequence[str] = ()
    subnets: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    volume_kms_key: str | None = None
    output_kms_key: str | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Instance type -> dollars an hour, before the built-in table."""

    def problems(self, *, has_image: bool) -> Iterator[str]:
        """What is missing, or does not fit together."""
        needed = {"role_arn": self.role_arn, "output_s3_path": self.output_s3_path}
        if not has_image:
            needed["image_uri"] = self.image_uri
        yield from (f"{name}: not set; SageMaker needs one" for name, value in needed.items() if not value)
        if self.spot and not self.checkpoint_s3_uri:
            yield "spot=true: machines are taken away without warning; set checkpoint_s3_uri to go on from there"
        if self.max_wait_s is not None and not self.spot:
            yield f"max_wait_s={self.max_wait_s}: only a spot job waits for machines; set spot=true or leave it out"
        if self.spot and self.keep_alive_s:
            yield f"keep_alive_s={self.keep_alive_s}: a warm pool is not for spot machines; choose one of them"
        if bool(self.security_group_ids) != bool(self.subnets):
            yield "security_group_ids, subnets: a network needs both of them, or neither"
        ours = [name for name in self.tags if name.startswith("atoll:")]
        yield from (f"tags.{name}: names that begin with `atoll:` are set by Atoll" for name in ours)
