//! TLS with a certificate and a key from PEM files.
//!
//! rustls with ring; TLS 1.2 and 1.3, HTTP/1.1. Refuses files that cannot be read, hold no certificate or key, or do not
//! belong together, with the name of the file and the flag.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Where certificate and key are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate and those that lead to a known one, PEM.
    pub certificates: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

/// Why there is no TLS.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file that cannot be used.
    #[error("{flag} {path}: {reason}")]
    File {
        /// The flag that named it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// They do not belong together, or the certificate is not one.
    #[error("certificate and key cannot be used: {0}; check --ssl-certfile and --ssl-keyfile")]
    Unusable(rustls::Error),
}

/// Reads both files.
pub(crate) fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let bad = |flag, path: &Path, reason: String| TlsError::File { flag, path: path.to_owned(), reason };
    let of_certificates = |reason| bad("--ssl-certfile", &files.certificates, reason);
    let read =
        CertificateDer::pem_file_iter(&files.certificates).and_then(|found| found.collect::<Result<Vec<_>, _>>());
    let certificates = read.map_err(|error| of_certificates(error.to_string()))?;
    if certificates.is_empty() {
        return Err(of_certificates("there is no certificate in PEM form in it".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key);
    let key = key.map_err(|error| bad("--ssl-keyfile", &files.key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Unusable)?;
    let mut config = config.with_no_client_auth().with_single_cert(certificates, key).map_err(TlsError::Unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
