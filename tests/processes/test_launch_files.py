"""The files of launch/ and the Dockerfile are what their tools accept, and train on the devices that they ask for."""

import copy
import functools
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from support.process_examples import ROOT

from parallax.cli import launch
from parallax.config.sections import DistributedConfig

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
JOB_SETS = ["gke_multislice", "gke_tpu_slice", "kubernetes_gpu"]


def read(name):
    return yaml.safe_load((ROOT / "launch" / f"{name}.yaml").read_text())


# ---- the tools that they are for


def linted(program, text_file, *flags):
    """What a linter says of a file, on both outputs; its status agrees. Its package is of the extra `tests`."""
    path = shutil.which(program, path=os.path.dirname(sys.executable))
    if path is None:
        pytest.skip(f"{program} is not installed: pip install -e '.[tests]' -c constraints.txt")
    ended = subprocess.run([path, *flags, text_file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert bool(ended.stdout) == bool(ended.returncode), f"{program} ended with {ended.returncode}: {ended.stdout}"
    return ended.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say_of_the_scripts(script):
    assert linted("shellcheck", script) == ""


def test_shellcheck_has_nothing_to_say_of_what_skypilot_runs(tmp_path):
    task = read("skypilot")
    (tmp_path / "task.sh").write_text(f"#!/bin/bash\n{task['setup']}\n{task['run']}")
    assert linted("shellcheck", tmp_path / "task.sh", "--exclude=SC2155") == ""  # the status of head is not asked for


def test_hadolint_has_nothing_to_say_of_the_dockerfile(tmp_path):
    assert linted("hadolint", ROOT / "Dockerfile") == ""
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && pip install jax\n")
    assert all(rule in linted("hadolint", tmp_path / "Dockerfile") for rule in ("DL3006", "DL3013", "DL3042"))


@functools.cache
def job_set_schema():
    """JSON Schema of a JobSet, with its jobs and pods; it knows no other fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the package is of the extra tests")
    schema = models.JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    for name, part in schema["$defs"].items():
        if name.endswith(("Quantity", "IntOrString")):
            schema["$defs"][name] = {"type": ["string", "number"]}
        elif "properties" in part:
            part["additionalProperties"] = False
    return schema


def wrong_in(manifest):
    """What a manifest has that a JobSet has not, or lacks."""
    import jsonschema

    def said(errors):
        for error in errors:
            yield error.message
            yield from said(error.context)  # of a field that may also be left out

    return [*said(jsonschema.Draft202012Validator(job_set_schema()).iter_errors(manifest))]


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_manifests_are_job_sets(name):
    assert wrong_in(read(name)) == []


def rules(manifest):
    return manifest["spec"]["failurePolicy"]["rules"][0]


def pod(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: rules(it).pop("name"), "'name' is a required property"),
        (lambda it: pod(it).update(restartPolcy="Never"), "'restartPolcy' was unexpected"),
        (lambda it: it["spec"]["failurePolicy"].update(maxRestarts="many"), "'many' is not"),
        (lambda it: pod(it)["containers"][0].update(volumeMounts=[{"name": "shared"}]), "'mountPath' is a required"),
    ],
)
def test_what_is_no_job_set_is_found(change, message):
    manifest = copy.deepcopy(read("gke_tpu_slice"))
    change(manifest)
    assert any(message in wrong for wrong in wrong_in(manifest))


# ---- what they start


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_examples_are_shell(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert ".venv/bin/python -u train.py --config=" in script.read_text()


@pytest.mark.parametrize(
    ("status", "state", "restarts", "requeued"),
    [
        (75, "RUNNING", 0, True),
        (137, "RUNNING", 99, True),  # a task was killed, and the others said 75
        (134, "RUNNING", 0, True),
        (137, "RUNNING", 100, False),
        (75, "COMPLETING", 0, False),  # by scancel
        (0, "RUNNING", 0, False),
        (1, "RUNNING", 0, False),
        (2, "RUNNING", 0, False),
        (127, "RUNNING", 0, False),  # no such command
    ],
)
def test_the_slurm_example_requeues_what_a_restart_cures(tmp_path, status, state, restarts, requeued):
    ended, srun = srun_of(tmp_path, status, state=state, restarts=restarts)
    assert ended == status and (tmp_path / "requeue").exists() == requeued
    assert "--run-name=first --max-runtime=7h45m --stopped-status=75" in srun
    assert srun.startswith("--cpus-per-task=32 ")
    assert not requeued or (tmp_path / "requeue").read_text() == "requeue 7\n"


def srun_of(tmp_path, status, *, state="RUNNING", restarts=0, ntasks=4):
    """The script's exit status and what it has srun do, with programs in place of Slurm's."""
    programs = {
        "srun": f'echo "$@" > {tmp_path}/srun; env > {tmp_path}/environment; exit {status}',
        "squeue": f"echo {state}",
        "scontrol": f'[ "$1" = show ] && echo n1 || echo "$@" > {tmp_path}/requeue',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": str(ntasks), "RUN_NAME": "first"}
    job |= {"SLURM_CPUS_PER_TASK": "32"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", ROOT / "launch" / "slurm.sh"], env=environment, timeout=60)
    return ended.returncode, (tmp_path / "srun").read_text()


def test_the_slurm_example_has_xla_and_nccl_end_and_name_what_hangs(tmp_path):
    """Options that this XLA knows: it ends a process that is told of others."""
    srun_of(tmp_path, 0)
    told = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    limit = f"--xla_gpu_nccl_termination_timeout_seconds={launch.NCCL_SECS}"
    assert told["NCCL_DEBUG"] == "WARN" and limit in told["XLA_FLAGS"]
    assert os.environ["XLA_FLAGS"].split()[-1] in told["XLA_FLAGS"]  # the user's own come behind, and win
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    for flags, is_known in ((told["XLA_FLAGS"], True), (told["XLA_FLAGS"].replace("_nccl_t", "_nccl_u"), False)):
        ended = subprocess.run(start, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True)
        assert (ended.returncode == 0) == is_known, ended.stderr


def test_nccl_is_ended_behind_every_limit_of_the_run():
    """While one process compiles, the others wait in their first collective."""
    limits = DistributedConfig()
    assert max(limits.compile_secs, limits.wait_secs) < launch.NCCL_SECS


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_the_slurm_example_trains_on_the_gpus_that_it_asks_for(tmp_path, nodes):
    """As shipped, and on more nodes."""
    script = (ROOT / "launch" / "slurm.sh").read_text()
    asked = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(\S+)$", script))
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("1", "1")
    assert "/" not in asked["output"]  # a folder that is not there yet would end the job without a word
    command = srun_of(tmp_path, 0, ntasks=nodes)[1].split(" process ")[1].split()
    assert command[:3] == [".venv/bin/python", "-u", "train.py"]
    own = [word for word in command[2:] if not word.startswith(("--run-name", "--max-runtime", "--stopped-status"))]
    assert len(own) == 2 + (nodes > 1)
    check_fits_on(own, nodes * int(asked["gpus-per-node"]), slices=1)


def test_the_launchers_example_for_gpus_trains_on_as_many_as_it_starts():
    (line,) = [line for line in launch.__doc__.splitlines() if "--gpus-per-process" in line]
    flags, command = line.split(" -- ")
    (processes,), (gpus,) = (re.findall(rf"--{name} (\d+)", flags) for name in ("processes", "gpus-per-process"))
    check_fits_on(command.split(), int(processes) * int(gpus), slices=1)


@pytest.mark.parametrize("name", ["gke_tpu_slice", "gke_multislice"])
def test_the_manifests_have_what_a_job_set_needs(name):
    manifest = read(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert job["parallelism"] == job["completions"] and slices["replicas"] == 1 + (name == "gke_multislice")
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
    assert {volume["name"] for volume in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    chips = job["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert chips == int(rows) * int(columns)
    check_trains_on(container["command"][2:] + container["args"], chips * slices["replicas"], slices["replicas"])


def test_the_manifest_for_gpus_starts_a_process_on_each_machine():
    manifest = read("kubernetes_gpu")
    (nodes,) = manifest["spec"]["replicatedJobs"]
    job, name = nodes["template"]["spec"], manifest["metadata"]["name"]
    (container,) = job["template"]["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert job["parallelism"] == job["completions"] == int(told["PARALLAX_NUM_PROCESSES"]) and nodes["replicas"] == 1
    assert told["PARALLAX_COORDINATOR"] == f"{name}-{nodes['name']}-0-0.{name}:8476"
    assert told["XLA_FLAGS"].endswith(f"={launch.NCCL_SECS}") and {"PARALLAX_PROCESS_ID", "NCCL_DEBUG"} < {*told}
    gpus = job["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    check_trains_on(container["command"][2:] + container["args"], gpus, slices=1)


def test_skypilots_example_starts_a_process_on_each_machine(tmp_path):
    task, python = read("skypilot"), tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nenv\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    started = {"cwd": tmp_path, "env": os.environ | nodes, "capture_output": True, "text": True, "check": True}
    lines = subprocess.run(["bash", "-c", task["run"]], **started).stdout.splitlines()
    told = dict(line.split("=", 1) for line in lines if "=" in line)
    place = [told[f"PARALLAX_{name}"] for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")]
    assert place == ["10.0.0.1:8476", "2", "1"] and told["XLA_FLAGS"].endswith(f"={launch.NCCL_SECS}")
    gpus = task["num_nodes"] * task["resources"]["accelerators"]["H100"]
    check_trains_on(lines[lines.index("train.py") :], gpus, slices=1)


def check_trains_on(arguments, chips, slices):
    """The command is right, and its model fits so many devices in so many slices."""
    own = [argument for argument in arguments if not argument.startswith(("--workdir", "--stopped-status=75"))]
    assert len(arguments) - len(own) == 2
    check_fits_on(own, chips, slices)


def check_fits_on(arguments, chips, slices):
    """The settings of a command line are those of a model that can be cut over so many devices."""
    from parallax.analysis.traced.trace import abstract_mesh
    from parallax.cli.command import read_command
    from parallax.config.settings import read_settings
    from parallax.sharding.mesh import resolve_sizes
    from parallax.step.step import model_of

    settings, _ = read_command(arguments, {})
    settings = read_settings(settings, model={"vocab": settings.model.vocab or 1024})
    sizes = resolve_sizes(settings.mesh, chips)
    assert sizes.get("replica", 1) % slices == 0
    model = model_of(settings, abstract_mesh(sizes))
    model.check_batch(settings.data.global_batch, settings.data.seq)
