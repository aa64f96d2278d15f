//! Connections: accepting, TLS, the times that a peer gets, and the end.
//!
//! Assumes a bound listener. A peer that is slow with its handshake or its head is cut off, and so is an idle connection;
//! a failed handshake or a broken connection concerns nobody else. At shutdown running requests are finished.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use crate::security::SecurityOptions;

/// Connections at once; more wait in the system's queue.
const MAX_CONNECTIONS: usize = 16_384;
/// Longest handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure to accept, as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// What every connection gets.
#[derive(Clone)]
struct Served {
    http: http1::Builder,
    router: Router,
    tls: Option<TlsAcceptor>,
}

/// Serves until `shutdown` resolves, then finishes what runs.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    options: &SecurityOptions,
    tls: Option<TlsAcceptor>,
    shutdown: impl Future<Output = ()>,
) {
    let mut http = http1::Builder::new();
    // Heads up to twice the limit are read, so that their senders are told what the limit is.
    http.timer(TokioTimer::new())
        .header_read_timeout(options.header_timeout)
        .max_header_size(2 * options.max_header_bytes);
    let (served, places) = (Served { http, router, tls }, Arc::new(Semaphore::new(MAX_CONNECTIONS)));
    let graceful = GracefulShutdown::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
            (accept(&listener).await, place)
        };
        tokio::select! {
            ((stream, peer), place) = accepted => {
                tokio::spawn(connection(stream, peer, served.clone(), graceful.watcher(), place));
            }
            () = &mut shutdown => break,
        }
    }
    // New peers are turned away while the rest is finished.
    drop(listener);
    graceful.shutdown().await;
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            // These concern the one peer that is gone already.
            Err(error) if is_of_peer(&error) => {}
            Err(error) => {
                tracing::warn!("no connection can be accepted now: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn is_of_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

type Watcher = hyper_util::server::graceful::Watcher;

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    served: Served,
    watcher: Watcher,
    place: OwnedSemaphorePermit,
) {
    // Tokens are small and should leave at once. Not possible on some sockets, and no reason to turn them away.
    let _ = stream.set_nodelay(true);
    match served.tls.clone() {
        None => speak(stream, peer, served, watcher).await,
        Some(tls) => match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
            Ok(Ok(stream)) => speak(stream, peer, served, watcher).await,
            Ok(Err(error)) => tracing::debug!("{peer}: TLS handshake: {error}"),
            Err(_) => tracing::debug!("{peer}: TLS handshake took too long"),
        },
    }
    drop(place);
}

async fn speak(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: SocketAddr,
    served: Served,
    watcher: Watcher,
) {
    let service = TowerToHyperService::new(served.router);
    let connection = served.http.serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        // Peers leave as they like; hyper's texts hold no user text.
        tracing::debug!("{peer}: {error}");
    }
}
