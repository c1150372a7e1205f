// Applies the last choice of light or dark before anything is drawn; without one, follows the system.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  /* storage may be switched off */
}
