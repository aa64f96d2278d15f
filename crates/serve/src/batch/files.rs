//! /v1/files: uploading, listing, reading and deleting the files of batches.
//!
//! An upload goes to the disk as it comes and appears when it is whole. Each caller sees its own files only. Refuses
//! purposes other than `batch`, files over the limit and files that a batch still reads.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::multipart::{Field, MultipartError, MultipartRejection};
use axum::extract::{DefaultBodyLimit, Multipart, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::line;
use super::record::FileRecord;
use super::store::{Batches, MAX_FILES, sync_folder};
use crate::caller::Caller;
use crate::errors::ApiError;
use crate::input::Name;
use crate::page::{Page, PageQuery};
use crate::server::{App, unix_seconds};
use crate::{job, sse};

/// What a form may hold besides the file.
const FORM_BYTES: u64 = 64 << 10;
/// Longest name of a file that is kept, characters.
const MAX_NAME: usize = 255;

/// The routes.
pub(crate) fn routes(app: &App) -> Router<Arc<App>> {
    let most = app.batches.as_ref().map_or(0, |store| store.options.max_file_bytes) + FORM_BYTES;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    Router::new()
        .route("/v1/files", post(upload).layer(DefaultBodyLimit::max(most)).get(list))
        .route("/v1/files/{id}", get(one).delete(remove))
        .route("/v1/files/{id}/content", get(content))
}

/// The store, or which flag brings it.
pub(super) fn store(app: &App) -> Result<&Arc<Batches>, ApiError> {
    app.batches.as_ref().ok_or_else(ApiError::no_batches)
}

/// What a failure of the disk is for a client; the log says more.
pub(super) fn storage(error: io::Error) -> ApiError {
    tracing::error!("the batch directory: {error}");
    ApiError::internal("reading or writing the files of batches failed; the server's log says why")
}

/// A file of the caller.
pub(super) fn find(store: &Batches, caller: &Caller, id: &str) -> Option<FileRecord> {
    store.index().files.get(id).filter(|file| file.tenant == caller.tenant).cloned()
}

fn found(store: &Batches, caller: &Caller, id: &str) -> Result<FileRecord, ApiError> {
    find(store, caller, id).ok_or_else(|| ApiError::no_such("file", id, "id"))
}

async fn upload(
    State(app): State<Arc<App>>,
    caller: Caller,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Json<Value>, ApiError> {
    let store = store(&app)?;
    let mut form = form.map_err(|rejection| ApiError::field("file", rejection.body_text()))?;
    let (mut purpose, mut upload) = (None, None);
    while let Some(field) = form.next_field().await.map_err(|error| broken(store, &error))? {
        match field.name() {
            Some("purpose") => purpose = Some(short_text(store, field).await?),
            Some("file") if upload.is_none() => upload = Some(receive(store, field).await?),
            // Clients send fields that mean nothing here (expires_after).
            _ => {}
        }
    }
    match purpose.as_deref() {
        Some("batch") => {}
        Some(_) => return Err(ApiError::field("purpose", "only batch is supported")),
        None => return Err(ApiError::field("purpose", "the field is missing; send batch")),
    }
    let upload = upload.ok_or_else(|| ApiError::field("file", "the field is missing; send a JSONL file"))?;
    let record = job::blocking(&app, move |_| upload.keep(caller.tenant).map_err(storage)).await?;
    Ok(Json(record.json()))
}

/// A field that is a word; what is longer is none of the words that are known.
async fn short_text(store: &Batches, mut field: Field<'_>) -> Result<String, ApiError> {
    let mut bytes = Vec::new();
    while let Some(piece) = field.chunk().await.map_err(|error| broken(store, &error))? {
        bytes.extend_from_slice(&piece[..piece.len().min(64 - bytes.len().min(64))]);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn broken(store: &Batches, error: &MultipartError) -> ApiError {
    match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::file_too_large(store.options.max_file_bytes),
        _ => ApiError::field("file", error.body_text()),
    }
}

/// A file that is not whole yet; its drop takes it back.
struct Upload {
    store: Arc<Batches>,
    id: String,
    filename: String,
    part: PathBuf,
    bytes: u64,
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.store.index().reserved_bytes -= self.bytes;
        // Gone already when the upload was kept.
        let _ = std::fs::remove_file(&self.part);
    }
}

impl Upload {
    fn reserve(&mut self, bytes: u64) -> Result<(), ApiError> {
        let (mut index, options) = (self.store.index(), &self.store.options);
        if self.bytes + bytes > options.max_file_bytes {
            return Err(ApiError::file_too_large(options.max_file_bytes));
        }
        if index.bytes() + bytes > options.max_bytes || index.files.len() >= MAX_FILES {
            return Err(ApiError::files_full(options.max_bytes, MAX_FILES));
        }
        index.reserved_bytes += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Makes it a file of `tenant`.
    fn keep(self, tenant: u64) -> io::Result<FileRecord> {
        let path = self.store.content(&self.id);
        std::fs::rename(&self.part, &path)?;
        sync_folder(&path)?;
        let record = FileRecord {
            id: self.id.clone(),
            tenant,
            bytes: self.bytes,
            created_at: unix_seconds(),
            filename: self.filename.clone(),
            purpose: "batch".to_owned(),
        };
        self.store.add_file(record.clone())?;
        Ok(record)
    }
}

async fn receive(store: &Arc<Batches>, mut field: Field<'_>) -> Result<Upload, ApiError> {
    let id = line::fresh_id("file-");
    let filename = field.file_name().unwrap_or("input.jsonl").chars().take(MAX_NAME).collect();
    let part = store.content(&id).with_extension("part");
    let mut upload = Upload { store: store.clone(), id, filename, part, bytes: 0 };
    let mut file = tokio::fs::File::create(&upload.part).await.map_err(storage)?;
    while let Some(piece) = field.chunk().await.map_err(|error| broken(store, &error))? {
        upload.reserve(piece.len() as u64)?;
        file.write_all(&piece).await.map_err(storage)?;
    }
    file.flush().await.map_err(storage)?;
    file.sync_all().await.map_err(storage)?;
    Ok(upload)
}

async fn list(State(app): State<Arc<App>>, caller: Caller, query: PageQuery) -> Result<Json<Value>, ApiError> {
    let store = store(&app)?;
    let page = Page::read(query, 10_000, 10_000)?;
    let wanted = page.get("purpose").map(str::to_owned);
    let mut files: Vec<FileRecord> = {
        let index = store.index();
        let own = index.files.values().filter(|file| file.tenant == caller.tenant);
        own.filter(|file| wanted.as_ref().is_none_or(|purpose| *purpose == file.purpose)).cloned().collect()
    };
    files.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
    Ok(Json(page.cut(files.iter().map(|file| (file.id.as_str(), file.json())))?))
}

async fn one(State(app): State<Arc<App>>, caller: Caller, Name(id): Name) -> Result<Json<Value>, ApiError> {
    Ok(Json(found(store(&app)?, &caller, &id)?.json()))
}

async fn remove(State(app): State<Arc<App>>, caller: Caller, Name(id): Name) -> Result<Json<Value>, ApiError> {
    let store = store(&app)?.clone();
    found(&store, &caller, &id)?;
    let reader = {
        let index = store.index();
        index.batches.values().find(|batch| batch.input_file_id == id && !batch.state.is_final()).map(|b| b.id.clone())
    };
    if let Some(batch) = reader {
        return Err(ApiError::conflict("file_in_use", format!("{batch} still reads the file; cancel it first")));
    }
    let gone = id.clone();
    job::blocking(&app, move |_| store.remove_file(&gone).map_err(storage)).await?;
    Ok(Json(json!({"id": id, "object": "file", "deleted": true})))
}

async fn content(State(app): State<Arc<App>>, caller: Caller, Name(id): Name) -> Result<Response, ApiError> {
    let store = store(&app)?;
    found(store, &caller, &id)?;
    let mut file = tokio::fs::File::open(store.content(&id)).await.map_err(storage)?;
    let bytes = file.metadata().await.map_err(storage)?.len();
    let (pieces, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let mut piece = vec![0; 64 << 10];
            match file.read(&mut piece).await {
                Ok(0) => return,
                Ok(read) => piece.truncate(read),
                // The client sees an answer that is shorter than its length.
                Err(error) => return tracing::error!("the batch directory: {error}"),
            }
            if pieces.send(piece.into()).await.is_err() {
                return;
            }
        }
    });
    let headers =
        [(header::CONTENT_TYPE, "application/octet-stream".to_owned()), (header::CONTENT_LENGTH, bytes.to_string())];
    Ok((headers, Body::from_stream(sse::Frames(receiver))).into_response())
}
