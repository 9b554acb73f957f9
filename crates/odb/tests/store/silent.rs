//! Silent holders, and the threads that do not wait for them. A *holder* is the store that has a payload. A holder is
//! *lost* once it has been silent for a second, or could not be reached. A *share* is a part of the right to fetch a
//! payload; an unused one goes back to the holder. A *reference* names bytes of a payload, and a *wish* is a program's
//! request for a connection to a holder.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::RecvTimeoutError;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use shunt_odb::fetch::Call;
use shunt_odb::reference::PayloadId;
use shunt_odb::sources::End;
use zerocopy::IntoBytes;

use super::bed::{give, give_slowly};
use super::*;

/// Name of the holder that is silent, or slow, in these tests.
fn mute() -> Holder {
    Holder::named("mute")
}

fn reference(holder: Holder) -> Reference {
    let payload = PayloadId { holder, segment: 1, slot: 1, secret: 1 };
    Reference { payload, weight: Weight::WHOLE, offset: 0, length: 5000 }
}

/// Makes a program that has fetched from the other machine. Returns its access to the stores, and a reference to a
/// payload there.
fn reader_beside(here: &Bed, there: &Bed) -> (Holders, Reference) {
    let program = there.program();
    let reference = program.lease().unwrap().unwrap().put(&[IoSlice::new(&bytes(3, 5000))]).unwrap();
    let holders = here.holders();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_fetched(&holders, &reference, &bytes(3, 5000), "the payload"));
        connect(here, there);
    });
    (holders, reference)
}

/// Receives a program's next wish for a connection, and checks that it is for the mute holder. Returns the program's
/// number.
fn wish(here: &Bed) -> u64 {
    let (program, holder) = here.wishes.recv_timeout(PATIENCE).expect("a wish");
    assert_eq!(holder, mute());
    program
}

/// Connects the program that wishes for the mute holder to a socket. The socket accepts requests, and nothing answers
/// them while the returned end lives.
fn connect_to_nobody(here: &Bed) -> UnixStream {
    here.connects(wish(here), mute())
}

fn is_lost(outcome: Result<Vec<u8>, FetchError>) -> bool {
    matches!(outcome, Err(FetchError::Holder(..)))
}

/// Whether a fetch succeeds by now. If it does, checks that it gets these bytes.
fn comes(holders: &Holders, reference: &Reference, expected: &[u8]) -> bool {
    fetch(holders, reference).inspect(|got| assert_same_bytes(got, expected, "the payload")).is_ok()
}

/// Checks that fetches fail without waiting: if each waited for a second, all would take more than eight minutes.
/// Without waiting they take less than a minute, even on a busy machine.
fn is_lost_at_once(holders: &Holders, reference: &Reference) {
    let began = Instant::now();
    for turn in 0..500 {
        assert!(is_lost(fetch(holders, reference)));
        assert!(began.elapsed() < PATIENCE, "{turn} of them waited");
    }
}

fn still_waits<T>(waiting: &ScopedJoinHandle<'_, T>) {
    assert!(!waiting.is_finished(), "nobody waits any more for whoever says nothing: this has waited for that");
}

/// Waits until a thread reports that its fetch has failed, because the holder is lost. That takes about a second. The
/// limit can be generous, because a fault in the library would make it take minutes.
fn is_told(told: &mpsc::Receiver<bool>) {
    assert_eq!(told.recv_timeout(Duration::from_secs(15)), Ok(true), "a silent holder is waited for for long");
}

#[test]
fn nobody_waits_for_a_holder_that_cannot_be_reached() {
    let (here, there) = two_machines();
    let (holders, body) = reader_beside(&here, &there);
    let program = here.program();
    let own = program.lease().unwrap().unwrap().put(&[IoSlice::new(&bytes(4, 5000))]).unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| tell.send(is_lost(fetch(&holders, &reference(mute())))).unwrap());
        let wish = wish(&here);
        assert_fetched(&holders, &body, &bytes(3, 5000), "from the other machine");
        still_waits(&waiting);
        assert_fetched(&holders, &own, &bytes(4, 5000), "from this machine");
        still_waits(&waiting);
        is_told(&told);
        is_lost_at_once(&holders, &reference(mute()));
        assert_eq!(here.wishes.try_recv().map(|_| ()), Err(mpsc::TryRecvError::Empty), "one attempt at a time");
        here.orders.reached(wish, mute(), None);
    });
}

#[test]
fn nobody_waits_for_a_holder_that_never_answers() {
    let (here, there) = two_machines();
    let (holders, body) = reader_beside(&here, &there);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = std::iter::repeat_n(&tell, 8)
            .map(|tell| (tell.clone(), &holders))
            .map(|(tell, holders)| scope.spawn(move || tell.send(is_lost(fetch(holders, &reference(mute()))))))
            .collect();
        let _silent = connect_to_nobody(&here);
        let returns = Returns::default();
        let nothing = Weight::from_log2(0).unwrap();
        returns.give(reference(mute()).payload, nothing);
        returns.give(body.payload, nothing);
        let returned = || there.counters.returned.load(std::sync::atomic::Ordering::Relaxed);
        wait_for("the other machine has its share again", || {
            holders.send_returns(&returns);
            returned() == 1
        })
        .unwrap();
        waiting.iter().for_each(still_waits);
        assert_fetched(&holders, &body, &bytes(3, 5000), "the payload");
        waiting.iter().for_each(still_waits);
        waiting.iter().for_each(|_| is_told(&told));
        is_lost_at_once(&holders, &reference(mute()));
    });
}

/// Makes two machines, and a payload on the second. A reader on the first will consider the second's store lost.
/// Returns both machines, the program that keeps the payload, and the payload's reference.
fn silent_holder() -> (Bed, Bed, Connection, Reference) {
    let (here, there) = (Bed::new(Limits::default()), Bed::named("mute", Limits::default()));
    let program = there.program();
    let body = program.lease().unwrap().unwrap().put(&[IoSlice::new(&bytes(3, 5000))]).unwrap();
    (here, there, program, body)
}

/// Makes the holder lost: it answers neither the fetch, nor the library's next attempt to connect. Both connections are
/// silent as long as the returned sockets live.
fn lose(here: &Bed, holders: &Holders, body: &Reference) -> [UnixStream; 2] {
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| tell.send(is_lost(fetch(holders, body))).unwrap());
        let asked = connect_to_nobody(here);
        is_told(&told);
        let tried = connect_to_nobody(here);
        is_lost_at_once(holders, body);
        [asked, tried]
    })
}

/// A holder that accepts a new connection but does not answer on it costs no thread another second.
#[test]
fn a_holder_that_was_silent_is_there_again_once_its_store_answers() {
    let (here, there, _program, body) = silent_holder();
    let holders = here.holders();
    let _silent = lose(&here, &holders, &body);
    connect(&here, &there);
    wait_for("it is there again", || comes(&holders, &body, &bytes(3, 5000))).unwrap();
}

/// The library's own attempts are at least a second apart. The process learns of the holder's return earlier, from this
/// machine's agent.
#[test]
fn a_lost_holder_that_its_agent_has_again_is_tried_at_once() {
    let (here, there, _program, body) = silent_holder();
    let own_are = |stores: &[Holder]| here.known.lock().own_are(&stores.iter().copied().collect());
    own_are(&[mute()]);
    let holders = here.holders();
    let silent = lose(&here, &holders, &body);
    // The attempt that is under way gets no answer.
    own_are(&[]);
    is_lost_at_once(&holders, &body);
    own_are(&[mute()]);
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch(&holders, &body));
        connect(&here, &there);
        assert_same_bytes(&fetched.join().unwrap().unwrap(), &bytes(3, 5000), "the payload");
    });
    // The old attempt ends, and does not harm the new connection. Nothing tells when the library has noticed.
    drop(silent);
    for _ in 0..200 {
        assert_fetched(&holders, &body, &bytes(3, 5000), "the payload");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A program names a machine by one of the machine's addresses.
#[test]
fn a_program_reads_which_machines_can_fetch_from_which_stores() {
    let here = Bed::new(Limits::default());
    let holders = here.holders();
    let [near, far] = ["127.0.0.1", "10.0.0.9"].map(|address| End::of(address.parse().unwrap()));
    let own = Holder::named("m0");
    assert!(holders.is_source(near, &own) && !holders.is_source(near, &mute()) && !holders.is_source(far, &own));
    here.known.lock().are([("10.0.0.9".parse().unwrap(), own)]);
    assert!(holders.is_source(far, &own) && !holders.is_source(far, &mute()));
    here.orders.stop();
    wait_for("nobody keeps it any more", || !holders.is_source(far, &own)).unwrap();
}

#[test]
fn shares_go_back_without_waiting_where_nobody_takes_them() {
    let here = Bed::new(Limits::default());
    let holders = here.holders();
    let returns = Returns::default();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // More shares than the socket of a connection takes.
            for _ in 0..100 {
                (0..1000).for_each(|_| returns.give(reference(mute()).payload, Weight::WHOLE));
                holders.send_returns(&returns);
            }
            tell.send(true).unwrap();
        });
        let wished = wish(&here);
        is_told(&told);
        let (ours, _silent) = UnixStream::pair().unwrap();
        here.orders.reached(wished, mute(), Some((ours.into(), sealings()[0])));
        scope.spawn(|| {
            for _ in 0..100 {
                (0..1000).for_each(|_| returns.give(reference(mute()).payload, Weight::WHOLE));
                holders.send_returns(&returns);
            }
            tell.send(true).unwrap();
        });
        is_told(&told);
    });
}

/// Each attempt to connect is a line in the agent's log, so many shares must not cause many attempts.
#[test]
fn shares_of_a_holder_that_cannot_be_reached_make_no_attempt_each() {
    let here = Bed::new(Limits::default());
    let (holders, returns) = (here.holders(), Returns::default());
    let owes = || {
        returns.give(reference(mute()).payload, Weight::WHOLE);
        holders.send_returns(&returns)
    };
    assert!(owes(), "it is not reached yet");
    here.orders.reached(wish(&here), mute(), None);
    wait_for("it is lost", || !owes()).unwrap();
    for _ in 0..100 {
        assert!(!owes(), "they end with their leases");
    }
    assert!(here.wishes.try_recv().is_err(), "the agent is not asked a hundred times");
}

fn caller(here: &Bed) -> OwnedFd {
    let caller = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&caller, &SocketAddrUnix::new(here.path()).unwrap()).unwrap();
    caller
}

/// The agent is stopped, and with it the store, which is a thread of it.
#[test]
fn nobody_waits_for_a_silent_store_of_this_machine() {
    let (here, there) = two_machines();
    let (holders, body) = reader_beside(&here, &there);
    let program = here.program();
    let own = program.lease().unwrap().unwrap().put(&[IoSlice::new(&bytes(4, 5000))]).unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let stopped = here.user.lock();
        // The store waits for the locked agent to admit this caller, before it handles anything else.
        let _caller = caller(&here);
        let waiting = scope.spawn(|| tell.send(is_lost(fetch(&holders, &own))).unwrap());
        // Gives the thread a moment to send its request, because nothing tells when it has.
        assert_eq!(told.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout), "it waits");
        assert_fetched(&holders, &body, &bytes(3, 5000), "from the other machine");
        still_waits(&waiting);
        is_told(&told);
        is_lost_at_once(&holders, &own);
        drop(stopped);
        wait_for("it answers again", || comes(&holders, &own, &bytes(4, 5000))).unwrap();
    });
}

/// The answer takes more than a second in all, but bytes keep coming.
#[test]
fn a_slow_holder_is_not_a_silent_one() {
    let here = Bed::new(Limits::default());
    let holders = here.holders();
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch(&holders, &reference(mute())));
        let mut store = connect_to_nobody(&here);
        let mut request = [0; 64];
        assert!(store.read(&mut request).unwrap() > 0);
        let answer = [&[1, 0, 0, 0, 0, 0, 0, 0][..], 5000u64.to_le_bytes().as_bytes(), &bytes(3, 5000)].concat();
        for part in answer.chunks(answer.len() / 20) {
            std::thread::sleep(Duration::from_millis(100)); // the subject of the test: a slow holder
            store.write_all(part).unwrap();
        }
        assert_same_bytes(&fetched.join().unwrap().unwrap(), &bytes(3, 5000), "the payload");
    });
}

fn of(body: &[u8]) -> Reference {
    Reference { length: body.len() as u64, ..reference(mute()) }
}

/// Fetches a payload part by part. Returns the outcome, the bytes, and the number of turns.
fn some_by_some(holders: &Holders, whole: &Reference) -> (Result<(), FetchError>, Vec<u8>, u32) {
    let (mut got, mut turns) = (Vec::new(), 0);
    while (got.len() as u64) < whole.length {
        turns += 1;
        let left = Reference { offset: got.len() as u64, length: whole.length - got.len() as u64, ..*whole };
        let mut into = vec![0; left.length as usize];
        match holders.fetch_some(&left, &mut into, &Call::new(&|| true)) {
            Ok(some) => got.extend_from_slice(&into[..some]),
            Err(error) => return (Err(error), got, turns),
        }
    }
    (Ok(()), got, turns)
}

#[test]
fn a_program_that_does_not_block_takes_what_has_come_and_asks_again() {
    let here = Bed::new(Limits::default());
    let (holders, body) = (here.holders(), bytes(7, 700_000));
    let turns = std::thread::scope(|scope| {
        let holders = &holders;
        let body = &body;
        let reader = scope.spawn(move || {
            let (outcome, got, turns) = some_by_some(holders, &of(body));
            assert!(outcome.is_ok(), "{outcome:?} after {} bytes", got.len());
            assert_same_bytes(&got, body, "the payload");
            // Fetches some bytes of the payload, and then all bytes of shorter references to its beginning. The rest of
            // the first answer must not be mixed into these.
            let mut into = vec![0; 300_000];
            assert!(
                holders.fetch_some(&of(body), &mut vec![0; body.len()], &Call::new(&|| true)).unwrap() < body.len()
            );
            assert_fetched(holders, &Reference { length: 50_000, ..of(body) }, &body[..50_000], "the payload");
            let other = Reference { length: 300_000, ..of(body) };
            assert_eq!(holders.fetch_some(&other, &mut into, &Call::new(&|| false)).unwrap(), into.len());
            assert_same_bytes(&into, &body[..300_000], "all of another payload");
            turns
        });
        let mut store = connect_to_nobody(&here);
        let stop = store.try_clone().unwrap();
        scope.spawn(move || give_slowly(&mut store, body, usize::MAX));
        let turns = reader.join();
        stop.shutdown(std::net::Shutdown::Both).unwrap();
        turns.unwrap()
    });
    assert!(turns > 1);
}

/// The program fetches for four clients in turn. Bytes on their way for one client are not thrown away for another.
#[test]
fn clients_of_a_slow_holder_have_their_turns() {
    const EACH: usize = 100_000;
    let here = Bed::new(Limits::default());
    let (holders, body) = (here.holders(), bytes(7, 4 * EACH));
    let given = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut got = [const { Vec::new() }; 4];
            let mut turns = 0;
            while got.iter().any(|got| got.len() < EACH) {
                for (number, got) in got.iter_mut().enumerate().filter(|(_, got)| got.len() < EACH) {
                    let payload = PayloadId { slot: number as u32, ..reference(mute()).payload };
                    let offset = (number * EACH + got.len()) as u64;
                    let length = (EACH - got.len()) as u64;
                    let mut into = vec![0; length as usize];
                    let left = Reference { payload, offset, length, ..of(&body) };
                    let some = holders.fetch_some(&left, &mut into, &Call::new(&|| true)).unwrap();
                    got.extend_from_slice(&into[..some]);
                    turns += 1;
                }
            }
            (got.concat(), turns)
        });
        let mut store = connect_to_nobody(&here);
        let stop = store.try_clone().unwrap();
        let body = &body;
        let store = scope.spawn(move || give(&mut store, body, usize::MAX, 2_000));
        let got = reader.join();
        stop.shutdown(std::net::Shutdown::Both).unwrap();
        let (got, turns) = got.unwrap();
        assert_same_bytes(&got, body, "all clients' payloads");
        assert!(turns > 8, "{turns}");
        store.join().unwrap()
    });
    // If the reader did not run for a while, it has lost its turn. Then some bytes were sent in vain, and had to be
    // sent again.
    assert!(given.bytes < body.len() * 9 / 8, "{given:?} of {}", body.len());
}

/// The holder takes the request, and does not even send the head of an answer.
#[test]
fn a_program_that_does_not_block_is_not_held_up_by_a_silent_holder() {
    let here = Bed::new(Limits::default());
    let (holders, body) = (here.holders(), bytes(7, 50_000));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| some_by_some(&holders, &of(&body)));
        let _store = connect_to_nobody(&here);
        let (outcome, got, turns) = reader.join().unwrap();
        assert!(matches!(outcome, Err(FetchError::Holder(..))) && got.is_empty(), "{outcome:?}");
        assert!(turns > 2, "{turns}");
    });
}

/// The kernel takes shares for a store that reads nothing. That is no sign of life.
#[test]
fn a_holder_that_answers_nothing_is_lost_while_shares_go_back_to_it() {
    let here = Bed::new(Limits::default());
    let (holders, body) = (here.holders(), bytes(7, 50_000));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| some_by_some(&holders, &of(&body)));
        let store = connect_to_nobody(&here);
        let (returns, mut shares) = (Returns::default(), 0);
        // Fewer shares than fill the socket: a full socket would be silence, too.
        while !reader.is_finished() && shares < 200 {
            shares += 1;
            returns.give(reference(mute()).payload, Weight::WHOLE);
            holders.send_returns(&returns);
            std::thread::sleep(Duration::from_millis(20)); // the pace at which shares go back
        }
        drop(store);
        let (outcome, got, turns) = reader.join().unwrap();
        assert!(shares < 200 && got.is_empty() && outcome.is_err(), "{outcome:?} after {shares} shares in {turns}");
    });
}

#[test]
fn a_holder_that_falls_silent_is_lost_for_who_takes_what_has_come() {
    let here = Bed::new(Limits::default());
    let (holders, body) = (here.holders(), bytes(7, 700_000));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| some_by_some(&holders, &of(&body)));
        let mut store = connect_to_nobody(&here);
        give_slowly(&mut store, &body, 300_000);
        let (outcome, got, turns) = reader.join().unwrap();
        assert!(matches!(outcome, Err(FetchError::Holder(..))), "{outcome:?}");
        assert!(!got.is_empty() && turns > 1, "{} in {turns}", got.len());
        assert_same_bytes(&got, &body[..got.len()], "what has come");
        is_lost_at_once(&holders, &of(&body));
    });
}
