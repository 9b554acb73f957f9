/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Reports of a smaller path MTU (../icmp.h) as they arrive at the frontend:
 *
 *   the cited packet lies                         the report goes
 *   in the active region, and is outstanding      to its backend
 *   in a payload, and is not outstanding          nowhere: it is late, or made up
 *   among the frontend's own bytes                to the frontend's stack, in LOCAL numbers
 *
 * Outstanding is what the client has not acknowledged and has room for. A stranger who knows a
 * flow's addresses has to guess a number in that range, as on a connection without a shortcut.
 */
#ifndef REPORTS_H
#define REPORTS_H

#include "../steering.h"
#include "claims.h"
#include "numbers.h"
#include "spaces.h"

enum cites { SERVERS_BYTE, OUTSTANDING_PAYLOAD, OTHER_PAYLOAD };

/* Says where the cited packet lies. Under the flow's lock. */
static __always_inline enum cites cites(const struct flow *flow, __u32 seq)
{
    const struct spaces *s = &flow->spaces;
    __s64 at = nth_position(s, 0, seq);

    if (at < 0 || at >= (__s64) nth_break(s, 0)->length)
        return SERVERS_BYTE;
    bool outstanding = s->status == SHUNT_REGION_ACTIVE && at >= (__s64) s->acked &&
                       is_before(seq, client_edge(flow));
    return outstanding ? OUTSTANDING_PAYLOAD : OTHER_PAYLOAD;
}

#endif
