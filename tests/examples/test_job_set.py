"""Kubernetes' manifest has the form of a JobSet, and its pods find each other."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from pydantic import ValidationError

from jaxddp.distributed.cluster import find
from jaxddp.errors import BAD_INPUT

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "multi_node" / "jobset.yaml").read_text())


def understood(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what the schema understands of a manifest; fields that it does not have are left out."""
    return json.loads(JobsetV1alpha2JobSet.from_dict(manifest).to_json())


def test_the_manifest_is_valid() -> None:
    assert understood(MANIFEST) == MANIFEST


def test_a_wrong_field_and_a_wrong_type_are_noticed() -> None:
    wrong = copy.deepcopy(MANIFEST)
    wrong["spec"]["failurePolicy"]["maxRestart"] = 20
    assert understood(wrong) == MANIFEST != wrong
    wrong = copy.deepcopy(MANIFEST)
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "4"
    with pytest.raises(ValidationError, match="parallelism"):
        understood(wrong)


def test_bad_input_is_not_tried_again() -> None:
    (rule,) = MANIFEST["spec"]["failurePolicy"]["rules"]
    (job,) = MANIFEST["spec"]["replicatedJobs"]
    (of_pods,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert of_pods == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [BAD_INPUT]}}
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_pods_are_one_cluster() -> None:
    (job,) = MANIFEST["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert pods["completionMode"] == "Indexed" and pods["parallelism"] == pods["completions"]
    name = MANIFEST["metadata"]["name"]
    for number in range(pods["completions"]):
        cluster = find(environment | {"JOB_COMPLETION_INDEX": str(number)})
        assert cluster is not None
        assert (cluster.num_processes, cluster.process_id) == (pods["completions"], number)
        assert cluster.address[0] == f"{name}-{job['name']}-0-0.{name}"  # JobSet's name for the first pod
    script = container["command"][1]
    assert (ROOT / script).is_file() and "RUN" in environment
