"""An absl test case runs under the same macro and reports each of its cases."""

from absl import flags
from absl.testing import absltest, parameterized


class AbslStyleTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3)
  def test_parameterized(self, n):
    self.assertGreater(n, 0)

  def test_flags_are_parsed(self):
    self.assertTrue(flags.FLAGS.is_parsed())
    self.create_tempfile(content="x")


if __name__ == "__main__":
  absltest.main()
