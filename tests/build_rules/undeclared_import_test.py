"""A test sees what its target declares, and nothing else."""

import importlib.util
import os
import sys

import pytest


@pytest.mark.parametrize("name", ["absl", "jax", "numpy", "libtpu"])
def test_an_undeclared_distribution_cannot_be_imported(name):
  assert importlib.util.find_spec(name) is None


@pytest.mark.parametrize("name", ["kernels.base.options", "undeclared_sibling"])
def test_an_undeclared_module_cannot_be_imported(name):
  with pytest.raises(ImportError):
    importlib.import_module(name)


def test_the_sibling_is_there_to_be_leaked():
  # Without this the test above would pass for want of the file.
  source = os.path.realpath(__file__)
  assert os.path.exists(os.path.join(os.path.dirname(source), "undeclared_sibling.py"))
  assert os.path.dirname(source) not in sys.path
