"""A frontend and an intermediate in front of the servers of nginx's test suite. They are hosts of a lab (network
namespaces made by shunt-lab), with real agents and the real kernel.

The suite (perl, its daemons, its nginx) runs on the lab's backend host, on that host's loopback. InFront.pm has its
servers listen on the service network, too. Its connections to them begin on the client host, and go to the frontend.
At the frontend and at the intermediate, nginx listens on every port of the suite, twice, and passes requests on:

  8000-8999     with Shunt
  18000-18999   without
"""
import ctypes, json, os, re, signal, subprocess

from confined import Missing, to_first_network
from wait import wait_for

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
BUILT = os.path.join(ROOT, "target/release")
MODULE = os.path.join(ROOT, "nginx/build/ngx_http_shunt_module.so")
WITHOUT = 10000  # distance of a port without Shunt from the same port with Shunt

NGINX = """
load_module {module};
user root; daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log {directory}/error.log info;
events {{ worker_connections 8192; }}
http {{
    shunt_agent {directory}/agent.sock;
    access_log off;
    client_body_temp_path {directory}/a; proxy_temp_path {directory}/b; fastcgi_temp_path {directory}/c;
    uwsgi_temp_path {directory}/d; scgi_temp_path {directory}/e;
    # Whatever the suite sends and expects is to pass.
    client_max_body_size 0; large_client_header_buffers 8 64k; merge_slashes off;
    ignore_invalid_headers off; underscores_in_headers on;
    proxy_buffer_size 64k; proxy_buffers 8 64k; proxy_busy_buffers_size 128k; proxy_request_buffering off;
    proxy_redirect off; proxy_set_header Host $http_host; proxy_set_header Connection $http_connection;
    proxy_pass_header Date; proxy_pass_header Server; proxy_pass_header X-Pad;
    proxy_pass_header X-Accel-Redirect; proxy_pass_header X-Accel-Expires; proxy_pass_header X-Accel-Charset;
    proxy_pass_header X-Accel-Limit-Rate; proxy_pass_header X-Accel-Buffering;
    proxy_ignore_headers X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate X-Accel-Buffering X-Accel-Charset;
{servers}
}}
"""
SERVER = """
    server {{
        listen {address}:{ports};
        {shunt}
        location / {{
            # The upstream is asked in the version that the client has asked in.
            error_page 418 = @old;
            if ($server_protocol != HTTP/1.1) {{ return 418; }}
            proxy_http_version 1.1;
            proxy_pass http://{upstream}:$server_port;
        }}
        location @old {{
            proxy_pass http://{upstream}:$server_port;
        }}
    }}
"""
AGENT = """
name = "{name}"
listen = "{address}:7440"
socket = "{directory}/agent.sock"
pins = "{pins}-{name}"
cgroup = "{cgroup}"
[tls]
certificate = "{ca}/{name}.pem"
key = "{ca}/{name}.key"
ca = "{ca}/ca.pem"
crl = "{ca}/crl.pem"
[{role}]
interfaces = ["{interface}"]
[[peer]]
name = "{peer}"
address = "{peer_address}:7440"
speaks_for = [{speaks_for}]
"""


def ends_with_us():
    """Has a child end (SIGTERM) when its parent ends for any reason. To be called in the child."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def in_first_network():
    ends_with_us()
    to_first_network()


def end_of(log):
    """Returns the last two lines of a log."""
    return " ".join(open(log, errors="replace").read().splitlines()[-2:])


class Host:
    """One host of the lab, as `shunt-lab lab up` describes it."""

    def __init__(self, name, namespace, addresses, bed):
        self.name, self.namespace, self.addresses = name, namespace, addresses
        self.directory = f"{bed.directory}/tiers-{name}"
        self.cgroup = f"{bed.hierarchy}/shunt-lab-{bed.id}-{name}"
        os.makedirs(self.directory, exist_ok=True)

    def address(self):
        """Returns the host's address in the service's network, or its only address."""
        return self.addresses[-1]

    def command(self, command):
        """Returns a command that runs the given command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *command]

    def join(self):
        """Makes a child a process of this host. To be called in the child."""
        ends_with_us()
        with open(f"{self.cgroup}/cgroup.procs", "w") as procs:
            procs.write("0")

    def start(self, command):
        log = f"{self.directory}/{os.path.basename(command[0])}.log"
        with open(log, "w") as out:
            return subprocess.Popen(self.command(command), preexec_fn=self.join, stdin=subprocess.DEVNULL,
                                    stdout=out, stderr=out), log


class Tiers:
    """One lab, and all that runs on its hosts. It ends with this process."""

    def __init__(self):
        for name in "shunt", "shunt-lab", "shuntd":
            if not os.path.exists(f"{BUILT}/{name}"):
                raise Missing(f"target/release/{name} is missing; make build builds it")
        # The lab starts in the first network namespace, whose settings say which congestion control all namespaces may
        # use.
        self.lab = subprocess.Popen([f"{BUILT}/shunt-lab", "lab", "up", "--tiers", "1", "--wire", "mtu"], text=True,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=in_first_network)
        self.hosts = self._described()
        self.frontend, self.intermediate = self.hosts["frontend"], self.hosts["intermediate1"]
        self.backend, self.client = self.hosts["backend"], self.hosts["client"]
        self.processes = []
        # The lab's hosts have no IPv6, but files of the suite need IPv6 on the loopback.
        loopback = "net.ipv6.conf.lo.disable_ipv6=0"
        subprocess.run(self.backend.command(["sysctl", "-q", "-w", loopback]), check=True)
        self._start_agents()
        self._start_servers()

    def _described(self):
        text = ""
        for line in self.lab.stdout:
            text += line
            if line.startswith("Ctrl-C"):
                break
        else:
            raise Missing("the lab does not start: `shunt-lab lab up` says why")
        self.id = re.search(r"^lab (\S+) ", text, re.M)[1]
        self.directory = re.search(r"^files:\s+(\S+)", text, re.M)[1]
        with open("/proc/mounts") as mounts:
            self.hierarchy = next(line.split()[1] for line in mounts if line.split()[2] == "cgroup2")
        found = re.findall(r"^  (\w+) +(shunt-\S+) +(.*)$", text, re.M)
        return {name: Host(name, space, re.findall(r"10(?:\.\d+){3}", ports), self) for name, space, ports in found}

    def _start_agents(self):
        ca = f"{self.directory}/tiers-ca"
        for command in ["init", ca], ["issue", ca, "frontend"], ["issue", ca, "backend"]:
            subprocess.run([f"{BUILT}/shunt", "ca", *command], check=True, stdout=subprocess.DEVNULL)
        pins = "/sys/fs/bpf/shunt-lab-" + self.id.replace(".", "-")
        logs = []
        for own, peer, interface in (self.frontend, self.backend, "client0"), (self.backend, self.frontend, "service0"):
            configuration = f"{own.directory}/shuntd.toml"
            with open(configuration, "w") as file:
                file.write(AGENT.format(
                    name=own.name, role=own.name, directory=own.directory, address=own.address(), cgroup=own.cgroup,
                    pins=pins, ca=ca, interface=interface, peer=peer.name, peer_address=peer.address(),
                    speaks_for=", ".join(f'"{address}"' for address in peer.addresses)))
            process, log = own.start([f"{BUILT}/shuntd", "--config", configuration])
            self.processes.append(process)
            logs.append(log)
        for host, log in zip((self.frontend, self.backend), logs):
            connected = lambda: any(peer["up"] for peer in (self._stats(host) or {"peers": []})["peers"])
            wait_for(connected, lambda: f"the agent of the {host.name} gets a session; {end_of(log)}", Missing)

    def _start_servers(self):
        for host, upstream, shunt in (
                (self.frontend, self.intermediate, "shunt on; shunt_mean_length 0; shunt_alone_length 0;"),
                (self.intermediate, self.backend, f"shunt_trust {self.frontend.address()} {self.backend.address()};")):
            if host is self.frontend:
                shunt += f" shunt_trust {upstream.address()};"
            listen = host.addresses[0]  # the address to which the previous tier connects
            served = [SERVER.format(address=listen, ports="8000-8999", shunt=shunt, upstream=upstream.address()),
                      SERVER.format(address=listen, ports="18000-18999", shunt="", upstream=upstream.address())]
            if host is self.intermediate:  # requests to 18000-18999 go to the suite's ports 8000-8999, too
                served[1] = served[1].replace("$server_port", "$suites_port")
                served.insert(0, "    map $server_port $suites_port { ~^1(8...)$ $1; }\n")
            configuration = f"{host.directory}/nginx.conf"
            with open(configuration, "w") as file:
                file.write(NGINX.format(module=MODULE, directory=host.directory, servers="".join(served)))
            process, log = host.start(["nginx", "-e", f"{host.directory}/error.log", "-c", configuration])
            self.processes.append(process)
            wait_for(lambda: os.path.exists(f"{host.directory}/nginx.pid") or process.poll() is not None,
                     lambda: f"nginx of the {host.name} starts; {end_of(log)}", Missing)
            if process.poll() is not None:
                raise Missing(f"nginx of the {host.name} does not start: {open(log).read().strip()}")

    @staticmethod
    def _stats(host):
        done = subprocess.run([f"{BUILT}/shunt", "stats", "--json", "--socket", f"{host.directory}/agent.sock"],
                              capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def counters(self):
        """Counters of the servers, frontend and backend together."""
        both = [(self._stats(host) or {}).get("servers", {}) for host in (self.frontend, self.backend)]
        return {name: sum(side.get(name, 0) for side in both) for name in both[0].keys() | both[1].keys()}

    def check(self):
        """Checks that the agents and servers on the hosts still run."""
        for process in self.processes:
            if process.poll() is not None:
                raise Missing(f"{' '.join(process.args[2:])} has ended: {process.returncode}; its log is in "
                              f"{self.directory}")

    def environment(self, client, with_shunt):
        """Returns variables for InFront.pm: at which address the suite's servers also listen, to which address
        connections to them go, from which host, and how much is added to the port."""
        return {"IN_FRONT_LISTEN": self.backend.address(), "IN_FRONT_CONNECT": self.frontend.addresses[0],
                "IN_FRONT_FROM": f"/run/netns/{client.namespace}", "IN_FRONT_PORTS": str(0 if with_shunt else WITHOUT)}

    def close(self):
        self.lab.terminate()
        self.lab.wait()
