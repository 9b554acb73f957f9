/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Steering at a frontend. Attached to the interfaces that face clients (tc, fe_in and fe_out) and
 * to the cgroup of the servers (fe_setsockopt). All state is in the `flows` map and
 * outlives the agent.
 */
#include "headers.h"

/* Set by the loader. Several agents may share a machine, one in each network namespace; a cgroup
 * program runs for all of them. 0: any. */
const volatile __u64 netns_cookie = 0;

#include "counters.h"
#include "flows.h"
#include "packet.h"
#include "parse.h"
#include "plain.h"
#include "sack.h"
#include "reset.h"
#include "spaces.h"
#include "claims.h"
#include "icmp.h"
#include "kernel.h"
#include "behind.h"
#include "proof.h"

#include "sockopt.h"
#include "path.h"
#include "ingress.h"
#include "egress.h"
#include "requests.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";
