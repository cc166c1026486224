import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import api
from model import config as config_lib

# Text parameters as transformers counts them on the meta device.
_COUNTS = {
  "397B-A17B": 396_346_350_336,
  "122B-A10B": 122_111_526_912,
  "35B-A3B": 34_660_610_688,
  "27B": 26_895_998_464,
  "9B": 8_953_803_264,
  "4B": 4_205_751_296,
  "2B": 1_881_825_088,
  "0.8B": 752_393_024,
}


@pytest.mark.parametrize("name", list(_COUNTS))
def test_presets_have_the_published_number_of_parameters(name):
  assert api.count_params(config_lib.preset(name)) == _COUNTS[name]


@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
def test_tiny_presets_are_tiny(name):
  assert 200_000 < api.count_params(config_lib.preset(name)) < 450_000


@pytest.mark.parametrize("name", list(config_lib.PRESETS))
def test_axes_name_every_dimension(name):
  config = config_lib.preset(name)
  shapes = api.abstract_params(config, config_lib.ModelOptions())
  axes = api.logical_axes(config)
  is_names = lambda x: isinstance(x, tuple)
  jax.tree.map(lambda a, s: np.testing.assert_equal(len(a), s.ndim), axes, shapes, is_leaf=is_names)


def test_float32_stays_where_it_must():
  options = config_lib.ModelOptions(weight_dtype="bfloat16")
  shapes = api.abstract_params(config_lib.preset("tiny_moe"), options)
  wide = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    if leaf.dtype == jnp.float32
  }
  gdn = "groups/gdn/gdn/"
  assert wide == {gdn + "A_log", gdn + "dt_bias", gdn + "norm/scale"}


def test_initial_distribution():
  config = config_lib.preset("tiny_moe")
  params = jax.jit(lambda k: api.init_params(config, config_lib.ModelOptions(), k))(
    jax.random.key(0)
  )
  gdn = params["groups"]["gdn"]
  rate = np.exp(gdn["gdn"]["A_log"])
  assert rate.min() >= 0.01 and rate.max() <= 16 and rate.std() > 2
  np.testing.assert_array_equal(gdn["gdn"]["dt_bias"], 1)
  np.testing.assert_array_equal(gdn["gdn"]["norm"]["scale"], 1)
  np.testing.assert_array_equal(params["final_norm"]["scale"], 0)
  for leaf in (
    params["embed"]["embedding"],
    params["lm_head"]["kernel"],
    gdn["gdn"]["conv1d"]["kernel"],
    gdn["mlp"]["wi"],
    gdn["mlp"]["router"]["kernel"],
  ):
    assert abs(np.mean(leaf)) < 3e-3
    np.testing.assert_allclose(np.std(leaf), config.initializer_range, rtol=0.08)
  # Layers differ from each other.
  kernel = gdn["gdn"]["in_proj_qkv"]["kernel"]
  assert float(jnp.abs(kernel[0, 0] - kernel[0, 1]).max()) > 0.01


def test_layers_beyond_the_last_group_and_no_gdn_at_all():
  base = config_lib.preset("tiny").to_hf()
  base.pop("layer_types")
  tail = config_lib.ModelConfig.from_hf(
    base | {"num_hidden_layers": 6, "full_attention_interval": 4}
  )
  shapes = api.abstract_params(tail, config_lib.ModelOptions())
  assert shapes["tail"]["gdn"]["A_log"].shape == (2, 4)
  full = config_lib.ModelConfig.from_hf(
    base | {"num_hidden_layers": 3, "full_attention_interval": 1}
  )
  shapes = api.abstract_params(full, config_lib.ModelOptions())
  assert "gdn" not in shapes["groups"] and "tail" not in shapes
  assert jax.tree.structure(shapes) == jax.tree.structure(
    api.logical_axes(full), is_leaf=lambda x: isinstance(x, tuple)
  )
