//! Stopping a server: at once when it is idle, at the second signal when a client holds a connection open.

use std::io::Write;
use std::net::TcpStream;

use crate::program::Server;

#[test]
fn an_idle_server_ends_at_the_first_signal() {
    let mut server = Server::start::<&str>(&[]);
    server.terminate();
    assert_eq!(server.ended(), Some(0));
}

#[test]
fn a_client_that_sends_half_a_request_cannot_keep_a_server_alive() {
    let mut server = Server::start::<&str>(&[]);
    let mut client = TcpStream::connect(server.address()).unwrap();
    client.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"mess").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    server.terminate();
    server.wait_for("finishing the running requests");
    server.terminate();
    assert_eq!(server.ended(), Some(0));
}
