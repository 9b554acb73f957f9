/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A parsed TCP packet, with the fields that the other files of this directory need. ../parse.h
 * fills it in; ../edit.h changes the packet itself.
 */
#ifndef PACKET_H
#define PACKET_H

#include "numbers.h"

/* Byte 13 of the TCP header (RFC 9293, 3.1). */
#define TH_FIN 0x01
#define TH_SYN 0x02
#define TH_RST 0x04
#define TH_PSH 0x08
#define TH_ACK 0x10
#define TH_URG 0x20
#define TH_ECE 0x40
#define TH_CWR 0x80

/* Numbers in the machine's order, addresses and ports in network order. */
struct packet {
    __u32 source[4]; /* IPv4 mapped */
    __u32 destination[4];
    __be16 source_port;
    __be16 destination_port;
    __u32 transport;    /* offset of the TCP header in the frame */
    __u32 header_bytes; /* length of the TCP header, with options */
    __u32 payload_bytes;
    __u32 seq;
    __u32 ack;
    __u32 tsval;
    __u32 tsecr;
    __u16 window;
    __u8 flags;      /* TH_* */
    __u8 timestamps; /* offset of the option's TSval in the TCP header, 0: none (RFC 7323) */
    __u8 sack;       /* offset of the option's kind in the TCP header, 0: none (RFC 2018) */
    __u8 sack_blocks;
    __u8 is_ipv6;
    __u8 is_odd; /* IP options or extension headers, or a first fragment (plain.h) */
};

/* Blocks of a selective acknowledgement (RFC 2018). */
#define SACK_BLOCKS_MAX 4

struct sack {
    __u32 blocks;
    __u32 left[SACK_BLOCKS_MAX];
    /* First byte behind the block. If it does not lie after `left`, the block is empty. */
    __u32 right[SACK_BLOCKS_MAX];
};

#endif
