/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Steering at a frontend. Attached to the interfaces that face clients (tc, fe_in and fe_out) and
 * to the cgroup of the servers (fe_setsockopt). The state of connections is in the map `flows`,
 * which outlives the agent.
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "egress.h"
#include "ingress.h"
#include "requests.h"
#include "sockopt.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";
