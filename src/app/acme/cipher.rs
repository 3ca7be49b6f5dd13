//! Encryption of the records that gateways share: AES-256-GCM with a key derived from `store.secret`.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};

/// Salt of the key derivation (HKDF, RFC 5869), which separates this key from other uses of the secret.
const SALT: &[u8] = b"sluicegate acme";

/// Label that identifies this use of the derived key.
const LABEL: &[u8] = b"shared records, AES-256-GCM";

/// First byte of an encrypted record: the version of its format.
const VERSION: u8 = 1;

/// Length of the key in bytes.
struct KeyLength;

impl KeyType for KeyLength {
    fn len(&self) -> usize {
        AES_256_GCM.key_len()
    }
}

/// Encrypts and decrypts records.
#[derive(Debug)]
pub(super) struct Cipher(RandomizedNonceKey);

impl Cipher {
    /// Derive the key from the secret of the store.
    ///
    /// # Errors
    /// The cryptographic library fails.
    pub(super) fn new(secret: &[u8]) -> Result<Self, Unspecified> {
        let mut key = [0; 32];
        Salt::new(HKDF_SHA256, SALT).extract(secret).expand(&[LABEL], KeyLength)?.fill(&mut key)?;
        RandomizedNonceKey::new(&AES_256_GCM, &key).map(Cipher)
    }

    /// Encrypt a record. Decryption succeeds only with the same name.
    ///
    /// # Errors
    /// The cryptographic library fails.
    pub(super) fn encrypt(&self, name: &str, content: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let mut sealed = content.to_vec();
        let nonce = self.0.seal_in_place_append_tag(Aad::from(name.as_bytes()), &mut sealed)?;
        Ok([&[VERSION][..], nonce.as_ref(), &sealed].concat())
    }

    /// Decrypt a record.
    ///
    /// # Errors
    /// The record was encrypted with another secret or for another name, or it was changed.
    pub(super) fn decrypt(&self, name: &str, encrypted: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let [VERSION, rest @ ..] = encrypted else { return Err(Unspecified) };
        let (nonce, sealed) = rest.split_at_checked(NONCE_LEN).ok_or(Unspecified)?;
        let mut sealed = sealed.to_vec();
        let nonce = Nonce::try_assume_unique_for_key(nonce)?;
        Ok(self.0.open_in_place(nonce, Aad::from(name.as_bytes()), &mut sealed)?.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_decrypt_only_with_their_name_and_secret() {
        let cipher = Cipher::new(b"secret").unwrap();
        let encrypted = cipher.encrypt("a.pem", b"key").unwrap();
        assert_eq!(cipher.decrypt("a.pem", &encrypted).unwrap(), b"key");
        assert_ne!(cipher.encrypt("a.pem", b"key").unwrap(), encrypted, "each has its own nonce");
        assert!(cipher.decrypt("b.pem", &encrypted).is_err());
        assert!(Cipher::new(b"other").unwrap().decrypt("a.pem", &encrypted).is_err());
        for wrong in [&[][..], &[1], &[2; 40], &encrypted[..encrypted.len() - 1]] {
            assert!(cipher.decrypt("a.pem", wrong).is_err(), "{wrong:?}");
        }
        let mut changed = encrypted;
        *changed.last_mut().unwrap() ^= 1;
        assert!(cipher.decrypt("a.pem", &changed).is_err());
    }
}
