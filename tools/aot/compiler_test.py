"""The TPU compiler in a subprocess: what it says comes back, and each failure is an answer."""

import os
import pathlib
import sys
import threading
import time

import pytest

from tools.aot import collectives, compiler, hlo, memory
from tools.roofline import machine

GRID = machine.Grid({"fsdp": 32, "context": 4, "expert": 2}, machine.TPU7X)


def compile_program(tmp_path, builder, **changes):
  values = {"builder": builder, "directory": str(tmp_path / "out"), "time_limit": 240.0}
  return compiler.compile_program(compiler.Request(**(values | changes)))


@pytest.fixture(scope="module")
def product(tmp_path_factory):
  return compile_program(tmp_path_factory.mktemp("product"), "tools.aot.programs:sharded_product")


def test_sharded_product_compiles_for_256_devices(product):
  module = hlo.parse(product.hlo.read_text())
  assert module.is_scheduled
  kernels = [
    i
    for c in module.computations.values()
    for i in c.instructions
    if i.custom_call_target == "tpu_custom_call"
  ]
  assert [k.op_name.split("/")[-2] for k in kernels] == ["block_product"]
  assert product.stages["lowered"] < product.seconds < 60
  assert product.peak_rss_bytes > 2**27
  assert 0.5 < product.cpu_seconds < 120


def test_memory_is_read_back(product):
  # One copy of the activations, bfloat16 [4096, 2048], is the least; the weights are sharded.
  assert 2**24 < product.verdict.used_bytes < 2**28
  assert product.verdict.fits and str(product.verdict).startswith("fits: 0.0")
  assert product.memory.hbm_bytes == product.verdict.used_bytes
  buffers = memory.read_buffers(product.buffer_assignment.read_text())
  parameters = [b for b in buffers if b.kind == "parameter" and b.shape.startswith("bf16")]
  # Rows and two stacks of weights, sharded 32 ways.
  assert sorted(b.bytes for b in parameters) == [3 * 2 * 2048 * 2048 // 32] * 2 + [2 * 4096 * 2048]


def test_collectives_are_read_back(product):
  module = hlo.parse(product.hlo.read_text())
  loop = next(i for i in module.entry.instructions if i.opcode == "while")
  assert hlo.trip_count(module, loop, module.entry) == 3
  body = module.computations[loop.called["body"][0]]
  read = lambda computation: [
    c for i in computation.instructions if (c := collectives.read(module, i, GRID))
  ]
  inside, outside = read(body), read(module.entry)
  assert [(c.kind, c.axes, c.payload_bytes) for c in inside] == [
    ("all-gather", ("fsdp",), 2 * 2048 * 2048)
  ] * 2
  assert all(c.is_async and c.offloaded for c in inside)
  assert [(c.kind, c.axes) for c in outside] == [("all-reduce", ("fsdp", "context", "expert"))]


def test_environment_is_set_in_the_child_only(product):
  assert not set(compiler._ENVIRONMENT) - {"JAX_PLATFORMS"} & set(os.environ)
  assert "xla_dump_to" not in os.environ.get("XLA_FLAGS", "")
  assert "jax" not in sys.modules  # nothing of JAX is needed on this side


@pytest.mark.parametrize("full", [False, True])
def test_too_little_hbm_is_a_verdict(tmp_path, full):
  result = compile_program(
    tmp_path, "tools.aot.programs:too_large", arguments={"gib": 60}, full=full
  )
  verdict = result.verdict
  assert not verdict.fits
  # Two arrays of 60 GiB against 94.75, whether the compiler's words or its report came first.
  assert verdict.used_bytes / 2**30 == pytest.approx(120, abs=0.1)
  assert verdict.limit_bytes == 94.75 * 2**30
  assert str(verdict).startswith("does not fit by 25.2")
  assert "RESOURCE_EXHAUSTED" in verdict.detail or not full


def test_the_report_alone_gives_the_same_verdict(product):
  text = product.hlo.with_name(
    product.hlo.name.removesuffix(".txt") + "-memory-usage-report.txt"
  ).read_text()
  small = memory.read_report(text)
  assert memory.judge(small).fits
  large = memory.judge(small, limit_bytes=small.hbm_bytes - 2**20)
  assert str(large).startswith("does not fit by 0.00 GiB") and not large.fits


def test_the_same_fault_gives_the_same_text():
  text = "I0102 begun\nF0102 03:04:05.678901    2345 module.cc:76] Check failed: whole()\n"
  assert compiler.relevant_lines(text) == ["module.cc:76] Check failed: whole()"]


def test_missing_libtpu_says_how_to_get_it(tmp_path):
  bare = [p for p in sys.path if p and not (pathlib.Path(p) / "libtpu").is_dir()]
  assert len(bare) < len([p for p in sys.path if p])
  with pytest.raises(compiler.LibtpuMissingError, match="pip_libtpu.*pip install libtpu"):
    compile_program(tmp_path, "tools.aot.programs:sharded_product", python_path=bare)
  assert not (tmp_path / "out").exists()


def test_compiler_abort_is_an_error_with_its_reason(tmp_path):
  with pytest.raises(compiler.CompilerAbortedError) as caught:
    compile_program(tmp_path, "tools.aot.faults:abort")
  text = str(caught.value)
  assert "SIGABRT" in text and "Check failed: planted.ok()" in text
  assert "a pass began" not in text and "0x7fcc" not in text


def test_time_limit_ends_the_whole_process_group(tmp_path):
  pid_file = tmp_path / "pid"
  start = time.monotonic()
  with pytest.raises(compiler.CompileTimeoutError, match="time limit of 1.5 s"):
    compile_program(
      tmp_path, "tools.aot.faults:hang", time_limit=1.5, arguments={"pid_file": str(pid_file)}
    )
  assert time.monotonic() - start < 10
  grandchild = pathlib.Path("/proc") / pid_file.read_text()
  for _ in range(100):
    gone = not grandchild.exists() or "State:\tZ" in (grandchild / "status").read_text()
    if gone:
      break
    time.sleep(0.05)
  assert gone


def test_another_thread_may_stop_it(tmp_path):
  stop = threading.Event()
  stop.set()
  request = compiler.Request(builder="tools.aot.faults:swell", directory=str(tmp_path / "out"))
  with pytest.raises(compiler.CompileStoppedError):
    compiler.compile_program(request, stop)


def test_memory_without_end_is_ended(tmp_path):
  with pytest.raises(compiler.CompileMemoryError, match="more than 0.5 GiB"):
    compile_program(tmp_path, "tools.aot.faults:swell", memory_limit=0.5 * 2**30)


def test_a_mistake_in_the_program_is_named(tmp_path):
  with pytest.raises(compiler.ProgramError, match="(?s)faults:mistake.*planted: axis of 7"):
    compile_program(tmp_path, "tools.aot.faults:mistake")


def test_a_value_that_the_trainer_refuses_is_told_in_one_line(tmp_path):
  with pytest.raises(compiler.ArgumentError) as caught:
    compile_program(tmp_path, "tools.aot.faults:wrong_mesh")
  assert str(caught.value) == (
    "mesh '2x2': want fsdp x expert x context, such as 32x2x4: each 1 to 999999999"
  )
  assert "\n" not in str(compiler.ArgumentError("a\nb", "ValueError"))


def test_what_jax_finds_in_the_trainers_code_is_no_refusal(tmp_path):
  with pytest.raises(compiler.ProgramError, match="ValueError in .*wrong_shape") as caught:
    compile_program(tmp_path, "tools.aot.faults:wrong_shape")
  assert not isinstance(caught.value, compiler.ArgumentError)


def test_a_program_that_the_compiler_refuses_is_an_error(tmp_path):
  with pytest.raises(compiler.ProgramError, match="faults:refused"):
    compile_program(tmp_path, "tools.aot.faults:refused")


def test_half_written_files_are_not_complete(product, tmp_path):
  whole = compiler.find_dump(product.hlo.parent)
  assert whole is not None and whole.complete()
  files = (whole.hlo, whole.buffer_assignment, whole.memory_report)
  for cut in files:
    text = cut.read_text()
    for part in (0.0, 0.3, 0.7, 0.97):
      for file in files:
        short = text[: int(part * len(text))] if file == cut else file.read_text()
        (tmp_path / file.name).write_text(short)
      half = compiler.find_dump(tmp_path)
      assert half is not None and not half.complete(), (cut.name, part)
  for missing in files[1:]:
    for file in files:
      (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / missing.name).unlink()
    assert not compiler._Dump(tmp_path / files[0].name).complete()


def test_only_modules_of_the_tpu_count(tmp_path):
  (tmp_path / "module_0001.jit_small.cpu_after_optimizations.txt").write_text("ENTRY")
  assert compiler.find_dump(tmp_path) is None
