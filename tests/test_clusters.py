"""docs/clusters.md: its scripts are well formed, and each recipe checks the cluster before it trains."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flashspan.train import parse

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
JOB = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0])
WORKER = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]
CONTAINER = WORKER["template"]["spec"]["containers"][0]
RECIPES = [*re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL), *CONTAINER["args"]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_a_shell_script_that_checks_and_then_trains(recipe: str) -> None:
    done = subprocess.run(["bash", "-n"], input=recipe, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert recipe.index("-m flashspan.check --preflight") < recipe.index("-m flashspan.train")
    assert "--rdzv-backend c10d" in recipe
    words = recipe.split("-m flashspan.train")[1].split()
    config = parse(words[:3])
    assert (ROOT / words[0]).is_file()
    assert config.parallel.context == 4 * 8


def test_there_is_a_recipe_for_torchrun_slurm_and_kubernetes() -> None:
    assert len(RECIPES) == 3
    assert "#SBATCH --ntasks-per-node=1" in RECIPES[1]
    assert "srun" in RECIPES[1]


def test_the_kubernetes_job_is_consistent() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    (script,) = CONTAINER["args"]
    assert f"--nnodes {WORKER['replicas']} " in script
    assert f"--nproc-per-node {CONTAINER['resources']['limits']['nvidia.com/gpu']} " in script
    assert f"--rdzv-endpoint {JOB['metadata']['name']}-worker-0:" in script
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in WORKER["template"]["spec"]["volumes"]}


def test_the_page_is_short_and_its_options_exist() -> None:
    assert len(TEXT.splitlines()) <= 150
    config = parse(["--parallel.strategy", "double_ring", "--parallel.inner", "8"])
    assert "--parallel.strategy double_ring --parallel.inner 8" in TEXT
    assert config.parallel.inner == 8
