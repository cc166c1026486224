"""Where the runs are put; the kills themselves take minutes and are the tool's own work."""

from tools.kill_resume import kill_resume


def test_a_relative_directory_is_seen_from_where_the_command_was_typed(tmp_path, monkeypatch):
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  root = kill_resume.work_directory("here/there")
  assert root == tmp_path / "here/there" and root.is_dir()
  assert kill_resume.work_directory(str(tmp_path / "x")) == tmp_path / "x"
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY")
  monkeypatch.chdir(tmp_path)
  assert kill_resume.work_directory("y") == tmp_path / "y"
  made = kill_resume.work_directory(None)
  assert made.is_absolute() and not list(made.iterdir())
  made.rmdir()
