"""The refusal table over the trainer's whole configuration: every rule's examples, via flags."""

import pytest

from kernels.base import cli, options, refusals
from rl import refusals as table
from rl import trainer_options


def _argv(values):
  declared = {o.name: o for c in trainer_options.COMPONENTS for o in options.declared(c)}
  return ["trainer", *(f"--{k}={declared[k].show(v)}" for k, v in values.items())]


def _parse(values, rules):
  return cli.parse(_argv(values), trainer_options.COMPONENTS, rules=rules, environ={})


def test_names_are_unique_and_the_defaults_are_accepted():
  names = [o.name for c in trainer_options.COMPONENTS for o in options.declared(c)]
  assert len(names) == len(set(names))
  settings = cli.parse(["trainer"], trainer_options.COMPONENTS, rules=table.RULES, environ={})
  assert settings.changed == {}


def test_rules_have_unique_names_and_known_keys():
  names = [rule.name for rule in table.RULES]
  assert len(names) == len(set(names))
  known = {o.name for c in trainer_options.COMPONENTS for o in options.declared(c)}
  for rule in table.RULES:
    assert set(rule.keys) <= known, rule.name


@pytest.mark.parametrize("rule", table.RULES, ids=lambda rule: rule.name)
def test_accepted_example(rule):
  settings = _parse(rule.accepted, table.RULES)
  # An example that changes none of the rule's keys would be accepted whatever the rule said.
  assert rule.effective or set(settings.changed) & set(rule.keys)


@pytest.mark.parametrize("rule", table.RULES, ids=lambda rule: rule.name)
def test_refused_example(rule):
  with pytest.raises(options.OptionError) as error:
    _parse(rule.refused, table.RULES)
  assert f"refused [{rule.name}]" in str(error.value)
  assert rule.reason in str(error.value)
  others = [r for r in table.RULES if r is not rule]
  settings = options.Settings(trainer_options.COMPONENTS, rule.refused)
  assert rule in refusals.broken_rules(settings, [*others, rule])


def test_every_broken_rule_is_reported_at_once():
  values = {}
  expected = []
  decided = set()  # An example that sets a key of an earlier rule may mend what that one refuses.
  for rule in table.RULES:
    if not decided & set(rule.refused):
      values |= rule.refused
      decided |= set(rule.keys) | set(rule.refused)
      expected.append(rule.name)
  assert len(expected) > 2
  with pytest.raises(options.OptionError) as error:
    _parse(values, table.RULES)
  for name in expected:
    assert f"[{name}]" in str(error.value)


def test_written_collectives_want_even_parts_of_the_vocabulary():
  values = {"model_preset": "397B-A17B", "mesh": "1024x1x1", "micro_batch_rows": 1024}
  rules = [r for r in table.RULES if r.name == "model-divides-over-mesh"]
  _parse(values, rules)  # left to the partitioner
  with pytest.raises(options.OptionError, match=r"\(vocab_size=248320 over 1024 devices\)"):
    _parse({**values, "kernel_implementation": "auto"}, rules)


DENSE, SPARSE = "tests/data/oracle/dense", "tests/data/oracle/moe"


@pytest.mark.parametrize(
  "rule, checkpoint, values",
  [
    ("moe-options-need-moe", DENSE, {"use_ring_of_experts": True, "use_ragged_sort": True}),
    ("routed-tensors-need-moe", DENSE, {"remat_policy": "custom", "moe_x_sorted": "device"}),
    ("replay-needs-experts", DENSE, {"router_replay": True}),
    ("model-divides-over-mesh", SPARSE, {"mesh": "1x64x1", "micro_batch_rows": 64}),
    (
      "head-group-divides-rank",
      SPARSE,
      {"kernel_implementation": "auto", "gdn_fwd_kernel_head_group_size": 2},
    ),
  ],
)
def test_rules_about_the_model_read_a_checkpoints_shape(rule, checkpoint, values):
  mesh = {"mesh": "2x2x2", "micro_batch_rows": 4}
  with pytest.raises(options.OptionError, match=rf"\[{rule}\]"):
    _parse({**mesh, "checkpoint": checkpoint, **values}, table.RULES)
  # What cannot be read is not judged here.
  _parse({**mesh, "checkpoint": "absent", **values}, [r for r in table.RULES if r.name == rule])
