//! Attacks by offers that are forged, replayed, stolen or too old: in a header field to a frontend, and in a fetch from
//! a backend's agent. An *offer* is a payload that a backend holds ready. Its *tag* proves for which request it is. A
//! *consent* is the request's header field that allows an offer. A *fetch* asks the backend's agent for an offer's
//! bytes. A *payload* is the body of a response. A body is *relayed* if it comes through all tiers.

use std::hash::Hasher;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use anyhow::{Context, Result, bail, ensure};
use shunt_lab::{Fetch, Fetched, Host, Lab, Options, Role, fetch};
use shunt_testbed::same_bytes;
use shunt_wire::Tag;
use shunt_wire::local::Reason;
use shunt_wire::peer::{self, Frame, Protocol};
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::service::impostor::{Connection, Impostor};
use crate::service::{FILES, Running, needs_root, same_file, start, start_on};

/// An offer as the tiers between backend and frontend see it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub number: u64,
    pub length: u64,
    pub tag: Tag,
}

impl Seen {
    fn of_field(field: &str) -> Result<Self> {
        let value = |name: &str| {
            let found = field.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            found.with_context(|| format!("no {name} in {field:?}"))
        };
        Ok(Self {
            number: u64::from_str_radix(value("offer")?, 16)?,
            length: value("length")?.parse()?,
            tag: Tag(u128::from_str_radix(value("tag")?, 16)?.to_be_bytes()),
        })
    }

    /// Has the backend's server make an offer for the frontend. The frontend's own server does not hear of the offer.
    pub fn made_for(frontend: &Host, backend: &Host, path: &str) -> Result<Self> {
        let answer = consenting(frontend, backend, path)?;
        ensure!(answer.length == 0, "the body came with the header");
        Self::of_field(answer.field("shunt-payload").context("no offer in the answer")?)
    }

    /// Returns the frame that fetches the offer.
    pub fn fetch_frame(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        let (offer, length) = (self.number.into(), self.length.into());
        let fetch = peer::Fetch { protocol: Protocol::OURS, offer, length, tag: self.tag, trace: Default::default() };
        fetch.emit(&mut frame);
        frame
    }

    pub fn with_another_tag(&self) -> Self {
        let mut tag = self.tag.0;
        tag[15] ^= 1;
        Self { tag: Tag(tag), ..self.clone() }
    }
}

/// Sends a request to the backend's server with a consent that names the frontend, and returns the answer.
pub fn consenting(frontend: &Host, backend: &Host, path: &str) -> Result<Fetched> {
    let address = backend.service_address().context("the backend's address")?;
    let mut asking = Fetch::new(SocketAddr::from((address, 80)));
    let (nonce, named) = (7_u128, [b"i".as_slice(), &address.to_ipv6_mapped().octets(), &80_u16.to_be_bytes()]);
    let mut meant_for = SipHasher24::new_with_key(&nonce.to_be_bytes());
    named.iter().for_each(|part| meant_for.write(part));
    let to = u64::from_be_bytes(meant_for.finish128().h1.to_le_bytes());
    let consent = format!("Shunt-Consent: 1; frontend={}; nonce={nonce:032x}; to={to:016x}; tiers=1", frontend.name());
    asking.headers = vec![consent];
    Ok(asking.run(frontend, &[path])?.remove(0))
}

/// Sends a fetch of an offer. Returns why it was refused. It is an error if the agent serves the fetch.
fn refusal(mut connection: Connection, offer: &Seen) -> Result<Reason> {
    connection.send(&offer.fetch_frame())?;
    let frame = connection.frame()?.context("closed without an answer")?;
    match Frame::parse(&frame) {
        Ok(Some((Frame::Refused(refused), _))) => {
            Reason::from_number(refused.reason.get()).context("a reason that is none")
        }
        other => bail!("answered by {other:?}"),
    }
}

/// Sends a fetch of an offer, and returns the payload.
pub fn served(mut connection: Connection, offer: &Seen) -> Result<Vec<u8>> {
    connection.send(&offer.fetch_frame())?;
    let frame = connection.frame()?.context("closed without an answer")?;
    let fetched =
        matches!(Frame::parse(&frame), Ok(Some((Frame::Fetched(fetched), _))) if fetched.length.get() == offer.length);
    ensure!(fetched, "answered by {frame:?}");
    Ok(connection.rest())
}

#[test]
fn an_offer_is_for_one_frontend_and_for_once() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let offer = Seen::made_for(frontend, backend, "/64k")?;
        let own = Impostor::with_certificate_of(service.lab, frontend.name())?;
        let tenant = Impostor::with_certificate_of(service.lab, "tenant")?;
        let refused = |who: &Impostor, offer: &Seen| refusal(who.connect(frontend, backend)?, offer);

        ensure!(refused(&tenant, &offer)? == Reason::UnknownOffer, "another tenant's agent");
        ensure!(refused(&own, &offer.with_another_tag())? == Reason::Tag, "a forged tag");
        let longer = Seen { length: offer.length + 1, ..offer.clone() };
        ensure!(refused(&own, &longer)? == Reason::Length, "a stretched offer");
        for number in [offer.number + 1, offer.number ^ 1 << 32, u64::MAX] {
            let guessed = Seen { number, ..offer.clone() };
            ensure!(refused(&own, &guessed)? == Reason::UnknownOffer, "a guessed number");
        }
        // None of these fetches has used up the offer. Only a fetch by the frontend that the offer was made for uses it
        // up.
        let bytes = served(own.connect(frontend, backend)?, &offer)?;
        same_bytes(&bytes, &std::fs::read(service.files.join("64k"))?)?;
        ensure!(refused(&own, &offer)? == Reason::UnknownOffer, "a replayed claim");
        service.still_good()
    })
}

#[test]
fn an_offer_dies_with_its_lifetime() -> Result<()> {
    needs_root();
    let mut options = Options::shunt();
    options.settings.agent_backend = "offer_lifetime = \"1s\"\n";
    start_on(Lab::builder(), FILES, options, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let offer = Seen::made_for(frontend, backend, "/64k")?;
        service.until_counted("agent.offers_expired", 1)?;
        let own = Impostor::with_certificate_of(service.lab, frontend.name())?;
        ensure!(refusal(own.connect(frontend, backend)?, &offer)? == Reason::UnknownOffer, "an old offer");
        ensure!(service.service.all_stats()?.count("agent.offers_expired") == 1, "not counted");
        service.still_good()
    })
}

/// Port of a tier that the frontend trusts and that lies: it passes requests on to the backend's server and changes the
/// offers.
const ROGUE_PORT: u16 = 8099;

fn rogue_location(lab: &Lab, host: &Host) -> String {
    let Some(address) = lab.backend().service_address().filter(|_| host.role() == Role::Frontend) else {
        return String::new();
    };
    format!("        location /rogue/ {{\n            proxy_pass http://{address}:{ROGUE_PORT}/;\n        }}\n")
}

/// Returns nginx's configuration, changed so that consents may pass through the rogue tier, which does not count itself
/// in them. The backend's nginx is told that the tier before it is `plain` (does not know Shunt).
fn trusting_strangers(host: &Host, text: String) -> String {
    let trust = |line: &str| match line.trim_start().starts_with("shunt_trust ") {
        true if host.role() == Role::Backend => line.replace(';', " plain;"),
        _ => line.to_owned(),
    };
    text.lines().map(|line| trust(line) + "\n").collect()
}

/// For each lie, answers one request honestly and the next one with the lie. A lie is made out of the header field of
/// the present offer and that of the first offer. The frontend refuses the lie and asks again without a consent. The
/// answer to this request is relayed.
fn be_rogue(listener: &TcpListener, server: SocketAddr, lies: &[Lie]) -> Result<()> {
    let mut first = None;
    let honest = Lie { name: "none", field: |field, _| field.into() };
    for (lie, is_last) in lies.iter().flat_map(|lie| [(&honest, false), (lie, true)]) {
        let mut tier = BufReader::new(listener.accept()?.0);
        let request = head(&mut tier)?;
        let mut upstream = BufReader::new(TcpStream::connect(server)?);
        upstream.get_mut().write_all(request.as_bytes())?;
        let answer = head(&mut upstream)?;
        let field = answer.lines().find_map(|line| line.strip_prefix("Shunt-Payload: ")).context("no offer")?;
        let first = first.get_or_insert_with(|| field.to_owned());
        let field = (lie.field)(field, first);
        write!(
            tier.get_mut(),
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\nShunt-Payload: {field}\r\n\r\n"
        )?;
        drop(tier);
        if is_last {
            relay(listener, server)?;
        }
    }
    Ok(())
}

/// Answers one request as a tier that does not know Shunt.
fn relay(listener: &TcpListener, server: SocketAddr) -> Result<()> {
    let mut tier = BufReader::new(listener.accept()?.0);
    let request = head(&mut tier)?;
    ensure!(!request.contains("Shunt-"), "asked again: {request:?}");
    let mut upstream = BufReader::new(TcpStream::connect(server)?);
    upstream.get_mut().write_all(request.as_bytes())?;
    tier.get_mut().write_all(head(&mut upstream)?.as_bytes())?;
    std::io::copy(&mut upstream.take(64 << 10), tier.get_mut())?;
    Ok(())
}

fn head(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        ensure!(stream.by_ref().take(8192).read_line(&mut head)? > 0, "the head ends early: {head:?}");
    }
    Ok(head)
}

struct Lie {
    name: &'static str,
    field: fn(&str, &str) -> String,
}

const LIES: &[Lie] = &[
    Lie { name: "the first offer again", field: |_, first| first.into() },
    Lie { name: "another tag", field: |field, _| changed(field, "tag=") },
    Lie { name: "another number", field: |field, _| changed(field, "offer=") },
    Lie { name: "another length", field: |field, _| field.replace("length=65536", "length=65535") },
    Lie { name: "an unknown backend", field: |field, _| field.replace("backend=", "backend=x") },
    Lie { name: "no field at all", field: |_, _| "1; offer=".into() },
];

/// Changes the first digit of the value that follows `name`.
fn changed(field: &str, name: &str) -> String {
    let at = field.find(name).map_or(0, |at| at + name.len());
    let digit = if field.as_bytes()[at] == b'1' { "2" } else { "1" };
    format!("{}{digit}{}", &field[..at], &field[at + 1..])
}

#[test]
fn a_tier_that_forges_or_replays_offers_costs_the_shortcut() -> Result<()> {
    needs_root();
    let mut options = Options::shunt();
    options.settings.locations = Some(rogue_location);
    options.settings.nginx_text = Some(trusting_strangers);
    start_on(Lab::builder(), FILES, options, lie_to)
}

fn lie_to(service: &mut Running<'_>) -> Result<()> {
    let backend = service.lab.backend();
    let server = SocketAddr::from((backend.service_address().context("the backend's address")?, 80));
    let listener = backend.run(|| TcpListener::bind(("0.0.0.0", ROGUE_PORT)))??;
    std::thread::scope(|scope| {
        let rogue = scope.spawn(|| backend.run(|| be_rogue(&listener, server, LIES)));
        for Lie { name, .. } in LIES {
            for what in ["honest", name] {
                let answer = fetch(service.lab.client(), service.service.chain().server(), &["/rogue/64k"])?.remove(0);
                ensure!(answer.status == 200, "{what}: status {}", answer.status);
                same_file(&service.files, "64k", &answer.sha256).with_context(|| what.to_owned())?;
            }
        }
        rogue.join().expect("the rogue tier's thread")?
    })?;
    let stats = service.frontend_stats()?;
    let refused: u64 = ["refused_tag", "refused_unknown_peer", "refused_malformed"]
        .iter()
        .map(|name| stats.count(&format!("servers.{name}")))
        .sum();
    ensure!(refused == LIES.len() as u64, "{refused} refusals counted: {}", stats.under("servers"));
    service.still_good()
}
