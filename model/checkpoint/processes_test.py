"""Two processes with two devices each: loading, saving, and a disk that fills up under one of them."""

import json
import os
import socket
import subprocess
import sys

import pytest

from model import config as config_lib
from model.checkpoint import fixtures, saving

_PROGRAM = """
import json, pathlib, sys
import jax
port, process, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jax.sharding import NamedSharding, PartitionSpec
from kernels.base import options
from model import config as config_lib
from model.checkpoint import directory, hf_names, loading, saving

config = config_lib.preset("tiny_moe")
mesh = jax.make_mesh((2, 2), ("expert", "fsdp"))
shardings = {}
for parameter in hf_names.parameters(config):
  names = [None] * len(parameter.shape)
  if parameter.path[-1] in ("wi", "wo"):
    names[-3] = "expert"
    names[-2] = "fsdp"
  elif parameter.shape[-1] % 4 == 0:
    names[-1] = ("fsdp", "expert")
  branch = shardings
  for key in parameter.path[:-1]:
    branch = branch.setdefault(key, {})
  branch[parameter.path[-1]] = NamedSharding(mesh, PartitionSpec(*names))

result = {}
close = directory.Checkpoint.close
def closing(self):
  result.setdefault("bytes_read", self.bytes_read)
  close(self)
directory.Checkpoint.close = closing

_, params = loading.load_params(folder / "from", shardings=shardings)
wi = params["groups"]["attn"]["mlp"]["wi"]
assert not wi.is_fully_addressable
# Windows smaller than a fused tensor, so that several are collected.
saving._WINDOW_BYTES = 40_000
saving.save_params(folder / "to", config, params, experts="fused", max_shard_bytes=150_000)

if process == 1:
  write = saving._write
  def failing(file, data):
    if file.tell() > 60_000:
      raise OSError(28, "No space left on device")
    write(file, data)
  saving._write = failing
try:
  saving.save_params(folder / "full", config, params, max_shard_bytes=150_000)
except options.UserError as error:
  result["error"] = str(error)
(folder / f"result{process}.json").write_text(json.dumps(result))
jax.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  config = config_lib.preset("tiny_moe")
  params = fixtures.random_params(config)
  saving.save_params(folder / "from", config, params)
  saving.save_params(folder / "want", config, params, experts="fused", max_shard_bytes=150_000)
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  processes = [
    subprocess.Popen([sys.executable, "-c", _PROGRAM, str(port), str(i), str(folder)])
    for i in range(2)
  ]
  try:
    codes = [process.wait(timeout=800) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert codes == [0, 0]
  return folder, [json.loads((folder / f"result{i}.json").read_text()) for i in range(2)]


def test_two_processes_save_what_one_saves(run):
  folder, _ = run
  assert fixtures.files(folder / "to") == fixtures.files(folder / "want")


def test_each_process_reads_its_own_devices_part(run):
  folder, results = run
  total = (folder / "from" / "model.safetensors").stat().st_size
  for result in results:
    assert 0.45 * total < result["bytes_read"] < 0.55 * total


def test_a_disk_full_under_one_process_stops_both(run):
  folder, results = run
  assert "No space left on device" in results[1]["error"]
  assert "another process failed to write" in results[0]["error"]
  assert sorted(os.listdir(folder)) == ["from", "result0.json", "result1.json", "to", "want"]
