"""Buildifier from the npm registry, or from PATH where there is no npm."""

_VERSION = "8.2.1"

_SHA256 = {
    "amd64": "6ceb7b0ab7cf66fceccc56a027d21d9cc557a7f34af37d2101edb56b92fcfa1a",
    "arm64": "3baa1cf7eb41d51f462fdd1fff3a6a4d81d757275d05b2dd5f48671284e9a1a5",
}

_WRAPPER = """#!/bin/sh
exec "%s" "$@"
"""

_ABSENT = """#!/bin/sh
echo "buildifier is not available: BUILD files were not checked." >&2
echo "Install npm, or put buildifier on PATH, then run: bazel sync --only=buildifier" >&2
exit 77
"""

def _buildifier_repository_impl(repository_ctx):
    repository_ctx.file("WORKSPACE", "workspace(name = %r)\n" % repository_ctx.name)
    repository_ctx.file("BUILD", 'exports_files(["buildifier"])\n')
    machine = repository_ctx.execute(["uname", "-m"]).stdout.strip()
    cpu = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine)
    npm = repository_ctx.which("npm")
    found = repository_ctx.which("buildifier")
    if npm and cpu:
        program = "buildifier-linux_" + cpu
        result = repository_ctx.execute([npm, "pack", "--silent", "@bazel/buildifier@" + _VERSION])
        archive = result.stdout.strip().split("\n")[-1]
        if result.return_code == 0 and archive:
            repository_ctx.extract(archive, output = "npm")
            binary = "npm/package/" + program
            digest = repository_ctx.execute(["sha256sum", binary]).stdout.split(" ")[0]
            if digest != _SHA256[cpu]:
                fail("%s of buildifier %s has digest %s, not %s" % (program, _VERSION, digest, _SHA256[cpu]))
            repository_ctx.execute(["chmod", "+x", binary])
            repository_ctx.symlink(binary, "buildifier")
            return
    if found:
        repository_ctx.file("buildifier", _WRAPPER % found, executable = True)
    else:
        repository_ctx.file("buildifier", _ABSENT, executable = True)

buildifier_repository = repository_rule(
    implementation = _buildifier_repository_impl,
    doc = "Defines @buildifier//:buildifier, a program that exits 77 where it could not be had.",
    environ = ["PATH"],
)
