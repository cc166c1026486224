"""The trainer's own programs: what is compiled follows its flags, and one of them for real."""

import json
import pathlib

import pytest

from kernels.base import cli, options
from tools.aot import compile_main, compiler, files, narrow, trainer_programs

SMALL = {
  "model_preset": "tiny",
  "row_tokens": 64,
  "micro_batch_rows": 8,
  "logps_chunk_size": 32,
  "mesh": "8x1x1",
}


def test_options_reach_the_program():
  settings = trainer_programs.settings_of({**SMALL, "stop_ids": [1, 2]})
  assert settings.row_tokens == 64 and settings.stop_ids == (1, 2)
  model, _, loss, batch, _ = trainer_programs.parts(settings, None)
  assert (model.num_hidden_layers, loss.logps_chunk_size, batch.micro_batch_rows) == (4, 32, 8)
  cut = trainer_programs.parts(trainer_programs.settings_of({"model_preset": "35B-A3B"}), 1)[0]
  assert cut.num_hidden_layers == 4 and cut.hidden_size == 2048 and cut.is_moe


def test_more_groups_than_the_model_has_are_refused():
  settings = options.Settings(compile_main.COMPONENTS, {"model_preset": "tiny"})
  with pytest.raises(
    options.OptionError, match="--groups=9: the model has 1; give at most as many"
  ):
    trainer_programs.parts(settings, 9)


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ({"serialize": True}, "needs --full"),
    ({"mesh": "4x1x1", "topology": "tpu7x:2x2x1"}, "has 8 devices"),
    ({"model_preset": "tiny", "groups": 9}, "--groups=9: the model has 1"),
  ],
)
def test_flags_that_contradict_each_other_are_refused(values, words):
  with pytest.raises(options.OptionError, match=words):
    compile_main.judge(options.Settings(compile_main.COMPONENTS, values))
  compile_main.judge(
    options.Settings(compile_main.COMPONENTS, {"mesh": "8x1x1", "topology": "tpu7x:2x2x1"})
  )
  wrong = ("tpu7x", "tpu7x:4x0x4", "tpu9:2x2x1", "tpu7x:3x2x1", "tpu7x:1x1x1")
  for given in (*(f"--topology={text}" for text in wrong), "--programs="):
    with pytest.raises(options.OptionError, match=given.split("=")[0]):
      cli.parse(["t", given], compile_main.COMPONENTS)


def test_flags_are_the_trainers_and_its_own():
  settings = options.Settings(compile_main.COMPONENTS, {"row_tokens": 128, "mesh": "8x1x1"})
  values = compile_main.trainer_values(settings)
  assert (values["row_tokens"], values["mesh"]) == (128, "8x1x1") and "topology" not in values
  assert json.loads(json.dumps(values)) == values
  assert trainer_programs.settings_of(values).row_tokens == 128


def test_a_step_is_priced_from_its_programs():
  seconds = {"first_micro_batch": 2.0, "accumulate": 3.0, "update": 0.5}
  assert "9 micro-batches: 26.500 s" in compile_main.step_line(seconds, 9)
  assert "all its programs" in compile_main.step_line({"update": 1.0}, 9)


def test_every_topology_that_libtpu_has_is_accepted():
  for text in ("tpu7x:2x2", "tpu7x:4x4x8", "v6e:2x2", "v5e:4x4", "v5p:2x2x1", "v4:2x2x1"):
    assert compile_main.topology_fault(text) is None


@pytest.mark.parametrize(
  "kind, raised, left",
  [
    ("UserError", options.UserError, []),
    ("OptionError", options.OptionError, []),
    (None, options.UserError, ["OUT", "first_micro_batch", "output.log"]),
  ],
)
def test_a_failure_leaves_nothing_stale_and_no_empty_folder(
  tmp_path, monkeypatch, kind, raised, left
):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)

  def fails(asked):
    folder = pathlib.Path(asked.directory)
    (folder / "dump").mkdir(parents=True)
    (folder / "output.log").write_text("")
    raise compiler.ArgumentError("planted", kind) if kind else compiler.ProgramError("planted")

  monkeypatch.setattr(compiler, "compile_program", fails)
  out = tmp_path / "OUT"
  values = {"mesh": "8x1x1", "topology": "tpu7x:2x2x1", "reports": str(out)}
  settings = options.Settings(compile_main.COMPONENTS, values)
  find = lambda: sorted({part.name for part in tmp_path.rglob("*")})
  with pytest.raises(raised, match="first_micro_batch: planted$") as caught:
    compile_main.run(settings)
  assert type(caught.value) is raised and find() == left
  # A previous run left its figures, and the user a note.
  out.mkdir(exist_ok=True)
  for name in ("first_micro_batch.json", "first_micro_batch.png", "update.json", "note"):
    (out / name).write_text("{}")
  with pytest.raises(raised):
    compile_main.run(settings)
  assert find() == sorted({"OUT", "note", *left})


def request(tmp_path, **changes):
  arguments = {
    "program": "first_micro_batch",
    "options": SMALL,
    "topology": "tpu7x:2x2x1",
  }
  return compiler.Request(
    builder="tools.aot.trainer_programs:lower",
    arguments=arguments | changes,
    directory=str(tmp_path / "out"),
    time_limit=400.0,
  )


def test_a_micro_batch_compiles_for_eight_devices(tmp_path):
  result = compiler.compile_program(request(tmp_path))
  made = narrow.of_result(result, files.grid_of("8x1x1", ()), "first_micro_batch")
  assert result.verdict.fits
  kinds = {(row.kind, row.axes) for row in made.collectives if row.loops}
  assert ("all-gather", ("fsdp",)) in kinds  # weights, layer by layer
  assert any(row.path[-1] == 3 for row in made.loops)  # the Gated DeltaNet layers of the group
  # Each device walks over its own tokens with the whole table: nothing is reduced in that walk.
  walks = [row for row in made.collectives if row.loops and "head" in row.origin]
  assert not walks, walks


def test_experts_run_over_each_devices_own_rows(tmp_path):
  values = SMALL | {"model_preset": "tiny_moe", "row_tokens": 256}
  result = compiler.compile_program(request(tmp_path, options=values))
  made = narrow.of_result(result, files.grid_of("8x1x1", ()), "first_micro_batch")
  model = trainer_programs.parts(trainer_programs.settings_of(values), None)[0]
  # Sorted by expert together, the rows of all devices would be moved between them; a layer's
  # weights are smaller.
  all_rows = 2 * 8 * 256 * model.num_experts_per_tok * model.moe_intermediate_size
  weights = 2 * 2 * model.num_experts * model.hidden_size * model.moe_intermediate_size
  assert weights < all_rows
  in_loops = [r for r in made.collectives if r.loops]
  assert in_loops and max(r.payload_bytes for r in in_loops) <= weights


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"mesh": "1x1x8"}, "linear_num_key_heads=2 does not divide over context = 8"),
    ({"mesh": "16x1x1"}, "16 devices, tpu7x:2x2x1 8"),
    ({"micro_batch_rows": 9}, "does not divide over fsdp x expert = 8"),
  ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, words):
  with pytest.raises(compiler.ProgramError, match=words):
    compiler.compile_program(request(tmp_path, options=SMALL | changes))
