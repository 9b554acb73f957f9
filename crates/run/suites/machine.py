"""This machine as a part of a service with Shunt. It has a control group and an agent (Shunt's daemon). The agent has a
store ([store] in its configuration), which keeps the bodies that programs under `shunt run` have written. On
connections between processes in the control group, BPF programs find out whether both ends run under `shunt run`."""
import json, os, shutil, subprocess, tempfile, time

from confined import Missing

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
BUILT = os.path.join(ROOT, "target/release")

CONFIGURATION = """
name = "suites"
drain = "0s"
listen = "{address}:7440"
socket = "{directory}/agent.sock"
cgroup = "{group}"
pins = "{pins}"
[tls]
certificate = "{directory}/suites/suites.pem"
key = "{directory}/suites/suites.key"
ca = "{directory}/suites/ca.pem"
crl = "{directory}/suites/crl.pem"
[store]
socket = "{directory}/store"
users = ["www-data", "nobody"]
"""


def unified_hierarchy():
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, place, kind, *_ = line.split()
            if kind == "cgroup2":
                return place
    raise Missing("no cgroup v2 hierarchy is mounted; mount -t cgroup2 none /sys/fs/cgroup/unified")


def own_address():
    """Returns an address that depends on the process ID, so that agents of other runs rarely have it."""
    process = os.getpid()
    return f"127.{128 | process >> 16 & 127}.{process >> 8 & 255}.{process & 255 | 1}"


class Machine:
    """An agent and its control group. Within `with`, everything that this process starts is in the control group."""

    def __init__(self):
        for name, package in ("shunt", "shunt"), ("shuntd", "shunt-agent"), ("libshunt_preload.so", "shunt-preload"):
            if not os.path.exists(f"{BUILT}/{name}"):
                raise Missing(f"{name} is not built; cargo build --release -p {package} builds it")
        if os.geteuid() != 0:
            raise Missing("it takes root to load BPF programs; run this with sudo")
        self.shunt = f"{BUILT}/shunt"
        # These names follow those of labs (crates/testbed). If this process is killed, the next sweep that removes the
        # remains of labs removes these, too.
        self.directory = f"{tempfile.gettempdir()}/shunt-lab-{os.getpid()}.0"
        os.mkdir(self.directory)
        self.hierarchy = unified_hierarchy()
        self.group = f"{self.hierarchy}/shunt-lab-{os.getpid()}.0-suites"
        self.pins = f"/sys/fs/bpf/shunt-lab-{os.getpid()}-0-suites"
        self.configuration = f"{self.directory}/shuntd.toml"
        self.agent = None

    def __enter__(self):
        for command in ["init", "suites"], ["issue", "suites", "suites"]:
            self._ca(command)
        os.mkdir(self.group)
        with open(self.configuration, "w") as file:
            file.write(CONFIGURATION.format(address=own_address(), directory=self.directory, group=self.group,
                                            pins=self.pins))
        with open(f"{self.directory}/shuntd.log", "w") as log:
            self.agent = subprocess.Popen([f"{BUILT}/shuntd", "--config", self.configuration], stdin=subprocess.DEVNULL,
                                          stdout=log, stderr=log, env=dict(os.environ, RUST_LOG="warn"))
        self._wait()
        self._move_to(self.group)
        return self

    def _ca(self, arguments):
        subprocess.run([self.shunt, "ca", *arguments], cwd=self.directory, check=True, stdout=subprocess.DEVNULL)

    def _wait(self):
        for _ in range(1000):
            if os.path.exists(f"{self.directory}/store") and self.counted() is not None:
                return
            if self.agent.poll() is not None:
                break
            time.sleep(0.01)
        with open(f"{self.directory}/shuntd.log") as log:
            raise Missing(f"the agent does not start: {log.read().strip()}")

    def _move_to(self, group):
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def __exit__(self, *_):
        self._move_to(self.hierarchy)
        self.agent.terminate()
        self.agent.wait()
        subprocess.run([f"{BUILT}/shuntd", "--config", self.configuration, "--detach"], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            os.rmdir(self.group)
        except OSError as error:
            print(f"a program of a suite still runs ({self.group}): {error}")

    def under_shunt(self, command):
        return [self.shunt, "run", "--config", self.configuration, "--", *command]

    def hanging(self):
        """Returns a report on a test that hangs: where each process of the suites waits, and the state of all
        connections."""
        found = ["==== hangs ===="]
        with open(f"{self.group}/cgroup.procs") as processes:
            for process in processes.read().split():
                for name in "cmdline", "syscall", "stack":
                    try:
                        with open(f"/proc/{process}/{name}") as file:
                            found.append(f"{process} {name}: " + file.read().replace("\0", " ").strip())
                    except OSError:
                        pass
        found.append(subprocess.run(["ss", "-tinoem"], capture_output=True, text=True).stdout)
        return "\n" + "\n".join(found)

    def counted(self):
        """Returns what the programs have counted, {program: {counter: value}}, or None if nothing answers."""
        done = subprocess.run([self.shunt, "stats", "--socket", f"{self.directory}/agent.sock", "--json"],
                              capture_output=True, text=True)
        return json.loads(done.stdout)["store"]["by_program"] if done.returncode == 0 else None
