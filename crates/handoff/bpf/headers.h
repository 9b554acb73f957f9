/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/* From outside: the kernel's interface headers and libbpf's. No vmlinux.h. */
#ifndef HEADERS_H
#define HEADERS_H

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

/* <sys/socket.h>, which a BPF target cannot include. */
#define AF_INET  2
#define AF_INET6 10

#include "../../../include/shunt.h"
#include "steering.h"

#endif
