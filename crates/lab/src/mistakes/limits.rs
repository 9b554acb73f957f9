//! Limits that are too small for the load.

use super::text::at;
use super::{Bodies, Mistake, Teller};
use crate::flow_table::FlowTable;
use crate::host::Role::{Backend, Frontend};

pub(super) fn rows() -> Vec<Mistake> {
    vec![
        Mistake::new("few-fetches", "`fetches` and `fetches_per_peer` are 1, and every body is fetched")
            .settings(|settings| {
                settings.agent_text = Some(|_, text| format!("{text}\n[limits]\nfetches = 1\nfetches_per_peer = 1\n"));
                settings.nginx_text = Some(|host, text| {
                    let filter =
                        "    access_log off;\n    sub_filter_types *;\n    sub_filter 'no file has this' '';\n";
                    at(Frontend, host, text, |text| super::text::swap(text, "    access_log off;\n", filter))
                });
            })
            .told(Teller::Agents, &["fetches"]),
        Mistake::new("few-handoffs", "`handoffs` is 1")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| format!("{text}\n[limits]\nhandoffs = 1\nhandoffs_per_peer = 1\n"))
                });
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Frontend), &["handoffs"]),
        Mistake::new("few-offers", "`offers` is 1")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Backend, host, text, |text| format!("{text}\n[limits]\noffers = 1\noffers_per_peer = 1\n"))
                });
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Backend), &["offers"]),
        Mistake::new("few-servers", "`servers` is 1, and nginx has more workers")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Frontend, host, text, |text| format!("{text}\n[limits]\nservers = 1\n")));
                settings.nginx_text = Some(|host, text| {
                    at(Frontend, host, text, |text| super::text::swap(text, "worker_processes 1", "worker_processes 3"))
                });
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Frontend), &["servers"]),
        Mistake::new("few-senders", "`senders` is 1")
            .settings(|settings| {
                settings.agent_backend = "senders = 1\n";
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Backend), &["senders"]),
        Mistake::new("flow-table-full", "the flow table is full")
            .after(|running| FlowTable::of(running.lab)?.fill())
            .told(Teller::Agent(Frontend), &["flow"]),
    ]
}
