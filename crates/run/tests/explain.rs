//! `shunt run --explain` says of real programs whether they are covered, and why.

use std::path::Path;
use std::process::Command;

use shunt_run::explain::{Clients, Coverage, explain};

#[test]
fn nginx_is_covered() {
    let explained = explain(Path::new("/usr/sbin/nginx")).unwrap();
    let Coverage::Calls(calls) = &explained.coverage else { panic!("{explained}") };
    for call in ["recv", "writev", "sendfile64", "accept4", "connect"] {
        assert!(calls.iter().any(|known| known == call), "{call} is not in {explained}");
    }
    // nginx imports these, too, but the library leaves them as they are.
    for call in ["bind", "munmap"] {
        assert!(!calls.iter().any(|known| known == call), "{call} is in {explained}");
    }
}

#[test]
fn a_static_program_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("static.c"), dir.path().join("static"));
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let built = Command::new("gcc").args(["-static", "-o"]).arg(&program).arg(&source).status().unwrap();
    assert!(built.success());
    let explained = explain(&program).unwrap();
    assert!(matches!(explained.coverage, Coverage::None(why) if why.contains("static")));
    let said = format!("{} runs without Shunt: it is statically linked", program.display());
    assert!(explained.uncovered().unwrap().starts_with(&said));
    assert_eq!(explain(Path::new("/usr/sbin/nginx")).unwrap().uncovered(), None);
}

#[test]
fn a_setuid_program_is_not_and_a_script_is_an_error() {
    assert!(
        matches!(explain(Path::new("/usr/bin/su")).unwrap().coverage, Coverage::None(why) if why.contains("setuid"))
    );
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    assert!(explain(&script).unwrap_err().to_string().contains("interpreter"));
}

#[test]
fn imports_show_to_which_clients_bodies_bypass_a_program() {
    let clients = |program: &str| explain(Path::new(program)).unwrap().clients;
    assert_eq!(clients("/usr/sbin/nginx"), Clients::Tls);
    assert_eq!(clients("/usr/sbin/haproxy"), Clients::OwnBio);
    assert_eq!(clients("/usr/bin/cat"), Clients::Tcp);
    let text = explain(Path::new("/usr/sbin/nginx")).unwrap().to_string();
    assert!(text.contains("TLS 1.3") && text.contains("[frontend]"), "{text}");
}
