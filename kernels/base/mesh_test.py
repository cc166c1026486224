"""The mesh's text."""

import pytest

from kernels.base import mesh


def test_text_and_back():
  shape = mesh.MeshShape.parse("32x2x4")
  assert (shape.fsdp, shape.expert, shape.context, shape.devices) == (32, 2, 4, 256)
  assert str(shape) == "32x2x4" and mesh.fault("32x2x4") is None
  assert list(shape.in_device_order.items()) == [("fsdp", 32), ("context", 4), ("expert", 2)]


@pytest.mark.parametrize(
  "text",
  ["32x2", "32x2x0", "axbxc", "32x2x4x1", "32 x2x4", "", "-1x2x4", "02x1x1", "\uff12x1x1"],
)
def test_other_text_is_refused(text):
  with pytest.raises(ValueError, match="fsdp x expert x context"):
    mesh.MeshShape.parse(text)
  assert "32x2x4" in (mesh.fault(text) or "")
